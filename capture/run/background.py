"""One thread that does jobs in order while the caller goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

Job = Callable[[], None]


class Background:
    """A worker thread with a bounded queue: `with Background(bound) as background: background.submit(job)`.

    A slow job slows the caller down once `bound` jobs wait; memory does not grow. The first exception of a job ends the work:
    later jobs are dropped, and it is raised by the next `submit` or on leaving the block. Where the block itself ends by an
    exception, the jobs already given are still done.
    """

    def __init__(self, bound: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(bound)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="hiddentap-background", daemon=True)

    def submit(self, job: Job) -> None:
        """Queue `job`; waits while the queue is full."""
        self._raise_error()
        self._jobs.put(job)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()
        if error is None:
            self._raise_error()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                    self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
