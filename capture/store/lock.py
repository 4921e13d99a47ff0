"""One writer per output folder."""

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from .errors import FolderLockedError

_held: set[int] = set()


def _drop_in_child() -> None:
    # A forked worker shares the lock; without this one that outlives its parent would keep the folder locked.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


class FolderLock:
    """An exclusive lock on a file, freed by `__exit__` or by the death of the process, however it dies.

    Raises FolderLockedError naming process and host of the owner. The file stays; only the lock on it counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> "FolderLock":
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take(fd)
        except BaseException:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)
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

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _owner(os.pread(fd, 4096, 0))
            raise FolderLockedError(
                f"{self._path.parent} is being written by {owner}; wait for it or choose another folder."
            ) from error


def _owner(raw: bytes) -> str:
    try:
        owner = json.loads(raw)
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
