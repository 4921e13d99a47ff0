"""Progress reports of long work."""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass
from typing import Protocol

LOGGER = logging.getLogger("hiddentap")


@dataclass(frozen=True)
class Work:
    """A stretch of work that begins.

    Attributes:
        what: one or two words, such as ``capturing``.
        total: how many samples it has, or how many of `unit`; None where that is not known.
        tokens: how many tokens it has; None where that is not known.
        done, done_tokens: how much of them an earlier run did.

    Example:
        >>> Work("capturing", total=1000, done=250).done
        250
    """

    what: str
    total: int | None = None
    unit: str = "samples"
    tokens: int | None = None
    done: int = 0
    done_tokens: int = 0


@dataclass(frozen=True)
class Done:
    """Work done since the last report, of the `Work` that began last.

    Attributes:
        count: samples, or units of the work; rejected ones count too.
        tokens: of them.
        written: bytes.
        rejected: samples, or input rows.

    Example:
        >>> Done(2, tokens=30) + Done(1, tokens=10, rejected=1)
        Done(count=3, tokens=40, written=0, rejected=1)
    """

    count: int = 0
    tokens: int = 0
    written: int = 0
    rejected: int = 0

    def __add__(self, more: Done) -> Done:
        return Done(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def __sub__(self, before: Done) -> Done:
        return Done(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


class Progress(Protocol):
    """Receives the reports of a run; any object with these three methods will do. An exception in one of them ends the run.

    Example:
        >>> class Percent:
        ...     def started(self, work: Work) -> None:
        ...         self.total, self.count = work.total, 0
        ...
        ...     def advanced(self, done: Done) -> None:
        ...         self.count += done.count
        ...
        ...     def note(self, text: str) -> None:
        ...         print(text)
        >>> shown = Percent()
        >>> shown.started(Work("capturing", total=4))
        >>> shown.advanced(Done(1, tokens=20))
        >>> f"{shown.count / shown.total:.0%}"
        '25%'
    """

    def started(self, work: Work) -> None:
        """Receive that `work` begins; the work before it is over."""

    def advanced(self, done: Done) -> None:
        """Receive how much more of it is done."""

    def note(self, text: str) -> None:
        """Receive one line of text for the user."""


class Silent(Progress):
    """The default receiver of progress: it shows nothing and sends notes to the logger ``hiddentap``."""

    def started(self, work: Work) -> None:
        return

    def advanced(self, done: Done) -> None:
        return

    def note(self, text: str) -> None:
        LOGGER.info(text)
