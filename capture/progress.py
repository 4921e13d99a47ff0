"""What work that takes long tells while it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Work:
    """A stretch of work that begins.

    Attributes:
        what: in one word or two, such as ``capturing``.
        total: how many samples it has, or what `unit` says; None where that is not known.
        tokens: how many tokens it has, None where that is not known.
        done, done_tokens: what an earlier run did of them.
    """

    what: str
    total: int | None = None
    unit: str = "samples"
    tokens: int | None = None
    done: int = 0
    done_tokens: int = 0


class Progress(Protocol):
    """Told what was done; shows it to a person, or nothing."""

    def started(self, work: Work) -> None:
        """`work` begins, and the work before it is over."""

    def advanced(self, count: int = 0, tokens: int = 0, *, written: int = 0, rejected: int = 0) -> None:
        """So many more are done, rejected ones among them; so many more bytes are written."""

    def note(self, text: str) -> None:
        """One line worth reading."""


class Silent(Progress):
    """Says nothing: what a Progress does where nobody is there to be told."""

    def started(self, work: Work) -> None:
        return

    def advanced(self, count: int = 0, tokens: int = 0, *, written: int = 0, rejected: int = 0) -> None:
        return

    def note(self, text: str) -> None:
        return
