"""One run per output folder."""

import fcntl
import json
import os
import socket
import stat
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...models.errors import UsageError
from .diskio import file_error, naming
from .errors import FolderLockedError

_held: set[int] = set()


def _drop_in_child() -> None:
    # A forked worker shares the lock; without this one that outlives its parent would keep the folder locked.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


class FolderLock:
    """A lock on a file, freed by `__exit__` or by the death of the process, however it dies; the file itself stays.

    The first process of a run has it alone, until `share` lets others of the same run in. They join by the first one's
    `claim`; a new run finds no way in while one of them lives, and one that comes too late, when the folder is another run's by
    then, does not either.

    Raises FolderLockedError naming process and host of the owner, UsageError for a link or anything else that is no file.
    """

    def __init__(self, path: Path, joining: str | None = None) -> None:
        """`joining`: the claim of the run's first process, None for that process itself."""
        self._path, self._joining = path, joining
        self.claim = joining or uuid.uuid4().hex
        self._fd: int | None = None

    def __enter__(self) -> Self:
        fd = self._opened()
        try:
            if self._joining is None:
                self._take(fd, fcntl.LOCK_EX)
                self._write_owner(fd, shared=False)
            else:
                self._take_beside(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd in _held:
            _held.remove(self._fd)
            os.close(self._fd)
        self._fd = None

    def _opened(self) -> int:
        try:
            # The owner is written into it: a link here would have another file overwritten, a pipe would wait.
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if self._path.is_symlink():
                raise UsageError(
                    f"{self._path} is a link to {self._path.readlink()}; expected a file of our own. Remove the link."
                ) from error
            raise file_error(self._path, "opened", error) from error
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise UsageError(f"{self._path} is no regular file; remove it, or choose another folder.")

    def share(self) -> None:
        """Let the other processes of the run in; inside the block. Raises FolderLockedError where another run was quicker."""
        if self._fd is None:
            raise FolderLockedError(f"{self._path} is not locked, so its lock cannot be shared.")
        # The system may free the lock for a moment in between; a run that came in then has written its own claim.
        self._take_beside(self._fd)
        self._write_owner(self._fd, shared=True)

    def _take_beside(self, fd: int) -> None:
        self._take(fd, fcntl.LOCK_SH)
        if self._owner(fd).get("claim") != self.claim:
            raise self._locked(fd)

    def _take(self, fd: int, kind: int) -> None:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._locked(fd) from error
        except OSError as error:
            raise file_error(self._path, "locked", error) from error

    def _locked(self, fd: int) -> FolderLockedError:
        owner = self._owner(fd)
        who = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
        others = " or by other processes of its run" if owner.get("shared") else ""
        return FolderLockedError(
            f"{self._path.parent} is being written by {who}{others}; wait for it or choose another folder."
        )

    def _write_owner(self, fd: int, *, shared: bool) -> None:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "claim": self.claim, "shared": shared}
        with naming(self._path, "written"):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)

    def _owner(self, fd: int) -> dict[str, Any]:
        """Return who claimed the file last; empty if it does not say."""
        with naming(self._path, "read"):
            text = os.pread(fd, 4096, 0)
        try:
            owner = json.loads(text)
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}
