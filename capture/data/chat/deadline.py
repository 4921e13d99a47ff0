"""Limits of time and memory on code that comes with a model, such as a chat template that loops or fills memory."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# How often the watching thread looks; a deadline is met that much late at most.
_LOOK_EVERY = 0.1


class DeadlineExceeded(BaseException):
    """Raised inside the block whose time is up; no `except Exception` of the code in it holds it up."""


class MemoryExceeded(DeadlineExceeded):
    """Raised inside the block that runs while the process takes more memory than the block may."""


@contextmanager
def deadline(seconds: float, memory: int | None = None) -> Iterator[None]:
    """Raise DeadlineExceeded inside the block once it has run for `seconds`.

    Raise MemoryExceeded once the process has grown by more than `memory` bytes since the block began. It holds in any thread,
    and one per thread. Only Python code is interrupted, between two of its steps: a long call into C runs to its
    end, and takes the memory that it takes. What other threads take meanwhile counts too.

    Example:
        >>> with deadline(10):
        ...     total = sum(range(1000))
    """
    thread = threading.get_ident()
    size = None if memory is None else _process_bytes() + memory
    _WATCH.add(thread, _Limits(time.monotonic() + seconds, size))
    try:
        yield
    finally:
        _WATCH.remove(thread)


@dataclass(frozen=True)
class _Limits:
    """When a block must end, and the size that the process may reach in it, in bytes."""

    end: float
    size: int | None

    def exceeded(self, now: float, size: int) -> type[BaseException] | None:
        if self.end <= now:
            return DeadlineExceeded
        return MemoryExceeded if self.size is not None and size > self.size else None


class _Watch:
    """One thread that interrupts the blocks whose time is up; a thread of its own for each block would cost more than a row."""

    def __init__(self) -> None:
        self._limits: dict[int, _Limits] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    def add(self, thread: int, limits: _Limits) -> None:
        with self._lock:
            self._limits[thread] = limits
            # A child process inherits this object without the thread.
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._look, name="hiddentap-deadline", daemon=True)
                self._watcher.start()

    def remove(self, thread: int) -> None:
        with self._lock:
            if self._limits.pop(thread, None) is None:
                # Its time was up while the block ended: what was set must not be raised outside it.
                _interrupt(thread, None)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY)
            with self._lock:
                now, size = time.monotonic(), _process_bytes()
                for thread, limits in list(self._limits.items()):
                    error = limits.exceeded(now, size)
                    if error is not None:
                        del self._limits[thread]
                        _interrupt(thread, error)
                if not self._limits:
                    self._watcher = None
                    return


def _process_bytes() -> int:
    """Memory that is this process's own, in bytes; 0 where the system does not tell."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return resident * os.sysconf("SC_PAGE_SIZE")


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


_WATCH = _Watch()
