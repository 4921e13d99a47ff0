"""A process-wide setting that holds while some block needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ProcessSetting:
    """Make the setting when the first block opens, and undo it when the last one ends, in whichever thread."""

    def __init__(self, make: Callable[[], None], undo: Callable[[], None]) -> None:
        self._make, self._undo = make, undo
        self._lock = threading.Lock()
        self._blocks = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the setting inside the block."""
        with self._lock:
            if self._blocks == 0:
                self._make()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._undo()
