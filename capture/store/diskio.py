"""Bytes to disk and back: whole reads and writes, a full disk told as such, names that appear only when complete."""

import errno
import fcntl
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from ...models.errors import RunError, UsageError
from .errors import DiskFullError, ShardError

COPY_BYTES = 4 << 20
# So much is written before the disk is told to begin with it: its work is then done beside ours, and little is left for the seal.
WRITE_BACK_BYTES = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Buffer: TypeAlias = bytes | bytearray | memoryview


@contextmanager
def full_disk_explained(path: Path, needed: int) -> Iterator[None]:
    """Turn "no space left", "over quota" and "file too large" into a DiskFullError for `needed` bytes at `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        stats = os.statvfs(path.parent)
        free = stats.f_bavail * stats.f_frsize
        raise DiskFullError(
            f"no room for {path.name} in {path.parent}: {needed} bytes needed, {free} free ({error.strerror}). "
            "Make room or raise the quota, then run again: sealed shards are kept."
        ) from error


def require_no_dangling_link(path: Path) -> None:
    """Raise UsageError where `path` or a folder on the way to it is a link to nothing: no folder can be made there."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise UsageError(
                f"{place} is a link to {place.readlink()}, which does not exist; make that folder, or give another one."
            )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, without a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def array_bytes(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> memoryview:
    """The memory of a contiguous array, without a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def create_file(path: Path) -> int:
    """A new file, open for reading and writing; RunError if it exists or cannot be made."""
    try:
        with full_disk_explained(path, 1):
            # The mode given at creation obeys the umask, a later chmod would not.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError as error:
        raise RunError(
            f"{path} exists: another process writes it, or one was killed; remove it in that case."
        ) from error
    except OSError as error:
        raise RunError(f"{path} cannot be created ({error.strerror}).") from error


def write_all(fd: int, data: Buffer, offset: int) -> None:
    """Write every byte of `data` at `offset`; one call of the system may write less than asked (2 GiB at most)."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_all(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` from `offset`; ShardError where the file ends before."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == len(view):
            return
        if count == 0:
            raise ShardError(
                f"{path}: ends at byte {offset}, {len(view)} more were due: it changed since it was opened."
            )
        view, offset = view[count:], offset + count


def copy_range(source: int, source_start: int, target: int, target_start: int, count: int, path: Path) -> None:
    """Copy `count` bytes between open files through a bounded buffer; `path` names the source in errors."""
    buffer = memoryview(bytearray(min(count, COPY_BYTES)))
    done = 0
    while done < count:
        part = buffer[: min(COPY_BYTES, count - done)]
        read_all(source, part, source_start + done, path)
        write_all(target, part, target_start + done)
        done += len(part)


def sync_folder(folder: Path) -> None:
    """Make names created or renamed in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: readers see the old file or the whole new one. Mode 0666 less the umask."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with full_disk_explained(path, len(data)):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                write_all(fd, data, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_abandoned(path: Path) -> None:
    """Remove an unsealed file whose process is gone; RunError where one still writes it."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError as error:
        raise RunError(f"{path} is being written by another process; run again once that one has ended.") from error
    finally:
        os.close(fd)


class UnsealedFile:
    """A safetensors file in the making, under a temporary name, its header length zero until `seal`.

    Readers know neither the name nor, with that length, the content. `discard` removes it. Its process holds a lock on it, so
    that another one can tell a file in the making from what a killed process left.
    """

    def __init__(self, target: Path, suffix: str = ".open") -> None:
        self.target = target
        self.path = target.with_name(target.name + suffix)
        self._fd: int | None = create_file(self.path)
        # Offset and count of each write in turn; numbers side by side, since small objects that stay would split the heap up.
        self._held_back = array("q")
        self._held_bytes = 0
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def fd(self) -> int:
        """Raises RunError once the file is sealed or discarded."""
        if self._fd is None:
            raise RunError(f"{self.path} is closed: it was sealed or discarded.")
        return self._fd

    def reserve(self, size: int) -> None:
        """Take `size` bytes of disk now, so that a full disk is met before the first row."""
        with full_disk_explained(self.target, size):
            os.posix_fallocate(self.fd, 0, size)

    def write(self, data: Buffer, offset: int) -> None:
        with full_disk_explained(self.target, offset + len(data)):
            write_all(self.fd, data, offset)
        self._write_back(offset, len(data))

    def read(self, view: memoryview, offset: int) -> None:
        read_all(self.fd, view, offset, self.path)

    def copy_from(self, source: int, source_start: int, start: int, count: int, path: Path) -> None:
        with full_disk_explained(self.target, start + count):
            copy_range(source, source_start, self.fd, start, count, path)
        self._write_back(start, count)

    def seal(self, header: bytes) -> None:
        """Data and header to disk first, the header's length after them, the name last."""
        with full_disk_explained(self.target, os.fstat(self.fd).st_size):  # a quota may speak up as late as in fsync
            write_all(self.fd, header, 8)
            os.fsync(self.fd)
            write_all(self.fd, len(header).to_bytes(8, "little"), 0)
            os.fsync(self.fd)
            self.path.replace(self.target)
        self._close()
        sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove the file unless it is sealed; may be called twice."""
        if self._fd is not None:
            self._close()
            self.path.unlink(missing_ok=True)

    def _write_back(self, offset: int, count: int) -> None:
        self._held_back.extend((offset, count))
        self._held_bytes += count
        if self._held_bytes >= WRITE_BACK_BYTES:
            for start, length in zip(self._held_back[::2], self._held_back[1::2], strict=True):
                # Advice that a dirty range is not needed makes the system begin to write it, without waiting for it.
                os.posix_fadvise(self.fd, start, length, os.POSIX_FADV_DONTNEED)
            self._held_back, self._held_bytes = array("q"), 0

    def _close(self) -> None:
        os.close(self.fd)
        self._fd = None
