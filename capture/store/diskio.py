"""Bytes to disk and back: whole reads and writes, a full disk told as such, names that appear only when complete."""

import errno
import fcntl
import os
import stat
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from ...models.errors import RunError, UsageError
from ..system_advice import FULL, system_advice
from .errors import DiskFullError, FileAccessError, ShardError

COPY_BYTES = 4 << 20
# So much is written before the disk is told to begin with it: its work is then done beside ours, and little is left for the seal.
WRITE_BACK_BYTES = 64 << 20
Buffer: TypeAlias = bytes | bytearray | memoryview


@contextmanager
def naming(path: Path, doing: str, needed: int = 1) -> Iterator[None]:
    """Name `path` in what the system says inside the block: an OSError becomes what `file_error` makes of it."""
    try:
        yield
    except OSError as error:
        raise file_error(path, doing, error, needed) from error


def file_error(path: Path, doing: str, error: OSError, needed: int = 1) -> RunError:
    """Return the error about `path` with the system's message and what to do.

    Args:
        doing: what was tried, as "opened", "read" or "written".
        needed: bytes that the file was to have, for a full disk.

    Returns:
        DiskFullError for "no space left", "over quota" and "file too large", else FileAccessError.
    """
    if error.errno in FULL:
        return DiskFullError(
            f"no room for {path.name} in {path.parent}: {needed} bytes needed, {_free(path.parent)} free "
            f"({error.strerror}).",
            "Make room or raise the quota, then run again: sealed shards are kept.",
        )
    return FileAccessError(f"{path}: cannot be {doing} ({error.strerror or error}).", system_advice(error))


def _free(folder: Path) -> int | str:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return "an unknown number"
    return stats.f_bavail * stats.f_frsize


def require_folder(path: Path, expected: str) -> None:
    """Raise UsageError where `path` is no folder, and say what was `expected` there."""
    if not path.is_dir():
        raise UsageError(f"{path} {'is a file' if path.exists() else 'is not there'}; expected {expected}.")


def require_room_for_folder(path: Path) -> None:
    """Raise UsageError where no folder can be made at `path`: something on the way to it is a file, or a link to nothing."""
    try:
        _require_room(path)
    except OSError as error:  # of a name that is too long, or a folder that may not be looked into
        raise UsageError(f"{path} cannot be made ({system_words(error)}); choose another folder.") from error


def system_words(error: Exception) -> str:
    """Return the error's text; of an OSError without its number and its path, which may be one that only this package knows."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _require_room(path: Path) -> None:
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise UsageError(
                f"{place} is a link to {place.readlink()}, which does not exist; make that folder, or give another one."
            )
        if place != path and place.exists() and not place.is_dir():
            raise UsageError(f"{path} cannot be made, because {place} is a file; choose another folder.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype, without a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def array_bytes(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> memoryview:
    """Return the memory of a contiguous array, without a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def create_file(path: Path) -> int:
    """Return a new file, open for reading and writing; RunError if it exists or cannot be made."""
    try:
        # The mode given at creation obeys the umask, a later chmod would not.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError as error:
        raise RunError(
            f"{path} exists: another process writes it, or one was killed; remove it in that case."
        ) from error
    except OSError as error:
        if error.errno in FULL:
            raise file_error(path, "created", error) from error
        raise FileAccessError(f"{path} cannot be created ({error.strerror}).", system_advice(error)) from error


def open_regular(path: Path) -> int:
    """Return the regular file at `path`, open for reading; never waits, as opening a pipe would.

    Raises:
        ShardError: no such file, or one that is no regular file. FileAccessError: it cannot be opened now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ShardError(f"{path}: cannot be opened ({error.strerror}).") from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ShardError(f"{path}: is no regular file.") from error
        raise file_error(path, "opened", error) from error
    try:
        with naming(path, "read"):
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if not regular:
            raise ShardError(f"{path}: is no regular file.")
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: Buffer, offset: int, path: Path) -> None:
    """Write every byte of `data` at `offset`; one call of the system may write less than asked (2 GiB at most)."""
    view, stop = memoryview(data), offset + len(data)
    try:
        while len(view):
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        raise file_error(path, "written", error, stop) from error


def read_all(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` from `offset`; ShardError where the file ends before."""
    try:
        while view:
            count = os.preadv(fd, [view], offset)
            if count == len(view):
                return
            if count == 0:
                raise ShardError(
                    f"{path}: ends at byte {offset}, {len(view)} more were due: it changed since it was opened."
                )
            view, offset = view[count:], offset + count
    except OSError as error:
        raise file_error(path, "read", error) from error


def read_bytes(fd: int, count: int, offset: int, path: Path) -> bytes:
    """Return the `count` bytes at `offset`; ShardError where the file ends before."""
    data = bytearray(count)
    read_all(fd, memoryview(data), offset, path)
    return bytes(data)


def copy_range(
    source: int, source_start: int, target: int, target_start: int, count: int, path: Path, target_path: Path
) -> None:
    """Copy `count` bytes between open files through a bounded buffer; the paths name source and target in errors."""
    buffer = memoryview(bytearray(min(count, COPY_BYTES)))
    done = 0
    while done < count:
        part = buffer[: min(COPY_BYTES, count - done)]
        read_all(source, part, source_start + done, path)
        write_all(target, part, target_start + done, target_path)
        done += len(part)


def sync_folder(folder: Path) -> None:
    """Make names created or renamed in `folder` survive a power cut."""
    with naming(folder, "written"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_file(path: Path) -> bytes:
    """Return all bytes of a small file; raise FileNotFoundError if there is none, FileAccessError if it cannot be read now."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise file_error(path, "read", error) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: readers see the old file or the whole new one. Mode 0666 less the umask."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path, "written", len(data)):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            try:
                write_all(fd, data, 0, path)
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
    with naming(path, "opened"):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError as error:
        raise RunError(f"{path} is being written by another process; run again once that one has ended.") from error
    except OSError as error:
        raise file_error(path, "removed", error) from error
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
        with naming(self.path, "locked"):
            fcntl.flock(self.fd, fcntl.LOCK_EX)

    @property
    def fd(self) -> int:
        """Raises RunError once the file is sealed or discarded."""
        if self._fd is None:
            raise RunError(f"{self.path} is closed: it was sealed or discarded.")
        return self._fd

    def reserve(self, size: int) -> None:
        """Take `size` bytes of disk now, so that a full disk is met before the first row."""
        with naming(self.target, "written", size):
            os.posix_fallocate(self.fd, 0, size)

    def write(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`."""
        write_all(self.fd, data, offset, self.target)
        self._write_back(offset, len(data))

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`."""
        read_all(self.fd, view, offset, self.path)

    def copy_from(self, source: int, source_start: int, start: int, count: int, path: Path) -> None:
        """Copy `count` bytes of the open file `source`, which `path` names, to `start`."""
        copy_range(source, source_start, self.fd, start, count, path, self.target)
        self._write_back(start, count)

    def seal(self, header: bytes) -> None:
        """Data and header to disk first, the header's length after them, the name last."""
        write_all(self.fd, header, 8, self.target)
        with naming(self.target, "written", 8 + len(header)):  # a quota may speak up as late as in fsync
            os.fsync(self.fd)
            write_all(self.fd, len(header).to_bytes(8, "little"), 0, self.target)
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
