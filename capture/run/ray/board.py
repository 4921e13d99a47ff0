"""Messages between a run on Ray and its workers: progress one way, a request to stop the other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...progress import Done, Work
from ..stopping import Stopping
from .cluster import require_ray

# Between two batches a worker asks no oftener than this whether the run is to end.
_ASK_EVERY_S = 0.2
# What is done before the first shard.
PREPARING: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerReport:
    """Progress of the workers since the last report.

    Attributes:
        started: what began since the last report.
        done: in all, since the run began.
        notes: lines worth reading since the last report.
    """

    started: list[Work]
    done: Done
    notes: list[str]


class Board:
    """Kept by one small actor; the run and all workers call it."""

    def __init__(self) -> None:
        self._started: list[Work] = []
        self._done: dict[tuple[int, ...], Done] = {}
        self._notes: list[str] = []
        self._signal: int | None = None

    def report(self) -> WorkerReport:
        """Return the report that the run shows."""
        report = WorkerReport(self._started, sum(self._done.values(), Done()), self._notes)
        self._started, self._notes = [], []
        return report

    def stop(self, number: int) -> None:
        """Request the end of the run, in the name of signal `number`."""
        self._signal = number

    def stopped_by(self) -> int | None:
        return self._signal

    def start(self, shards: tuple[int, ...]) -> None:
        """Record that a worker begins `shards`; drop the counts of a lost worker's attempt."""
        if shards in self._done:
            self._notes.append(f"a worker was lost; {_name(shards)} made again")
        self._done[shards] = Done()

    def advanced(self, shards: tuple[int, ...], more: Done) -> None:
        self._done[shards] += more

    def started(self, work: Work) -> None:
        self._started.append(work)

    def note(self, text: str) -> None:
        self._notes.append(text)


def _name(shards: tuple[int, ...]) -> str:
    if not shards:
        return "the plan is"
    if len(shards) == 1:
        return f"shard {shards[0]} is"
    return f"what is not sealed of shards {shards[0]} to {shards[-1]} is"


class WorkerProgress:
    """Progress of a worker, told to the board; `work`: the shards being filled."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self.work = PREPARING

    def started(self, work: Work) -> None:
        self._board.started.remote(work)

    def advanced(self, done: Done) -> None:
        self._board.advanced.remote(self.work, done)

    def note(self, text: str) -> None:
        self._board.note.remote(text)


class BoardStopping(Stopping):
    """Whether the board says that the run is to end."""

    def __init__(self, board: Any) -> None:
        super().__init__()
        self._board, self._next = board, 0.0

    def check(self) -> None:
        if time.monotonic() >= self._next:
            number = require_ray().get(self._board.stopped_by.remote())
            self._next = time.monotonic() + _ASK_EVERY_S
            if number is not None:
                self.ask(number)
        super().check()
