"""What work that takes long tells while it goes on."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what was done; shows it to a person, or nothing."""

    def started(
        self,
        what: str,
        total: int | None = None,
        *,
        unit: str = "samples",
        tokens: int | None = None,
        done: int = 0,
        done_tokens: int = 0,
    ) -> None:
        """A stretch of work begins, and the one before it is over.

        what: in one word or two, such as ``capturing``. total: how many samples (or what `unit` says) and how many tokens it
        has, None where that is not known. done, done_tokens: what an earlier run did of them.
        """

    def advanced(self, count: int = 0, tokens: int = 0, *, written: int = 0, rejected: int = 0) -> None:
        """So many more are done, rejected ones among them; so many more bytes are written."""

    def note(self, text: str) -> None:
        """One line worth reading."""


class Silent(Progress):
    """Says nothing: what a Progress does where nobody is there to be told."""
