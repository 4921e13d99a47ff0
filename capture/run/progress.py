"""What a run tells while it works."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by the run what it has done; shows it to a person, or nothing."""

    def tokenised(self, rows: int, rejected: int) -> None:
        """So many input rows were read so far, so many of them rejected."""

    def planned(self, samples: int, tokens: int, done_samples: int, done_tokens: int) -> None:
        """The plan is made; some of it may be done from an earlier run."""

    def captured(self, samples: int, tokens: int) -> None:
        """One more batch of so many samples and tokens is on its way to disk."""

    def note(self, text: str) -> None:
        """One line worth reading."""


class Silent:
    """Says nothing."""

    def tokenised(self, rows: int, rejected: int) -> None:
        pass

    def planned(self, samples: int, tokens: int, done_samples: int, done_tokens: int) -> None:
        pass

    def captured(self, samples: int, tokens: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass
