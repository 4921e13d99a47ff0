"""One run per output folder."""

import fcntl
import json
import os
import socket
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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

    Raises FolderLockedError naming process and host of the owner.
    """

    def __init__(self, path: Path, joining: str | None = None) -> None:
        """`joining`: the claim of the run's first process, None for that process itself."""
        self._path, self._joining = path, joining
        self.claim = joining or uuid.uuid4().hex
        self._fd: int | None = None

    def __enter__(self) -> Self:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
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

    def share(self) -> None:
        """Let the other processes of the run in; inside the block. Raises FolderLockedError where another run was quicker."""
        if self._fd is None:
            raise FolderLockedError(f"{self._path} is not locked, so its lock cannot be shared.")
        # The system may free the lock for a moment in between; a run that came in then has written its own claim.
        self._take_beside(self._fd)
        self._write_owner(self._fd, shared=True)

    def _take_beside(self, fd: int) -> None:
        self._take(fd, fcntl.LOCK_SH)
        if _owner(fd).get("claim") != self.claim:
            raise self._locked(fd)

    def _take(self, fd: int, kind: int) -> None:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._locked(fd) from error

    def _locked(self, fd: int) -> FolderLockedError:
        owner = _owner(fd)
        who = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
        others = " or by other processes of its run" if owner.get("shared") else ""
        return FolderLockedError(
            f"{self._path.parent} is being written by {who}{others}; wait for it or choose another folder."
        )

    def _write_owner(self, fd: int, *, shared: bool) -> None:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "claim": self.claim, "shared": shared}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)


def _owner(fd: int) -> dict[str, Any]:
    """Who claimed the file last; empty where it says no such thing."""
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
