"""What a generation tells while it works."""

from typing import Protocol


class GenerationProgress(Protocol):
    """Told by a generation what it has done; may raise to end it."""

    def started(self, requests: int) -> None:
        """So many requests are about to run."""

    def stepped(self, tokens: int) -> None:
        """A step committed so many tokens."""

    def ended(self) -> None:
        """One more request has ended."""


class SilentGeneration:
    """Says nothing."""

    def started(self, requests: int) -> None:
        pass

    def stepped(self, tokens: int) -> None:
        pass

    def ended(self) -> None:
        pass
