"""Requests that somebody gives up while a generation runs."""

import threading


class Aborts:
    """Hand it to a generation, and name requests to give up from anywhere: an observer, a callback, another thread.

    A request that is aborted ends with the tokens and rows that were committed before; nothing of the step that is under way
    is committed for it.
    """

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._lock = threading.Lock()

    def abort(self, index: int) -> None:
        """Give up request `index`, its place among the prompts; one that has ended stays as it is."""
        with self._lock:
            self._asked.add(index)

    def __contains__(self, index: int) -> bool:
        with self._lock:
            return index in self._asked
