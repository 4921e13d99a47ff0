"""Ending a run from outside, between two batches: what is sealed stays, and the same call goes on from there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ...models.errors import RunError


class RunStopped(RunError):  # noqa: N818 - an ending that was asked for
    """The run was asked to end; `exit_code` is 128 + the signal's number, as a shell counts."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command again to go on from here")
        self.exit_code = 128 + number


class Stopping:
    """A request, from outside, to end a run: between two batches the run then raises `RunStopped`; sealed shards stay.

    Example:
        >>> stopping = Stopping()
        >>> stopping.asked is None
        True
        >>> stopping.ask(15)  # from another thread, while `capture_dataset(settings, None, stopping)` runs
        >>> stopping.asked
        15
    """

    def __init__(self) -> None:
        self._signal: int | None = None

    def ask(self, number: int) -> None:
        """Request the end, in the name of signal `number`."""
        self._signal = number

    @property
    def asked(self) -> int | None:
        """Return the number of the signal that requested the end."""
        return self._signal

    def check(self) -> None:
        """Raise `RunStopped` if the end was asked for."""
        if self._signal is not None:
            raise RunStopped(self._signal)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM ask for the end inside the block; a second one ends the process as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def first(number: int, _frame: FrameType | None) -> None:
            self.ask(number)
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, first)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
