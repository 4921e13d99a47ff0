"""What an export or an import tells while it works."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what was done; shows it to a person, or nothing."""

    def started(self, what: str, samples: int) -> None:
        """A stretch of work on so many samples begins."""

    def advanced(self, samples: int, tokens: int) -> None:
        """So many more are done; those that an earlier run had done count too."""

    def note(self, text: str) -> None:
        """One line worth reading."""


class Silent:
    """Says nothing."""

    def started(self, what: str, samples: int) -> None:
        pass

    def advanced(self, samples: int, tokens: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass
