"""The fault of one input row."""

from ...models.errors import HiddentapError


class RowError(HiddentapError):
    """One input row cannot become a sample; the run turns it into a reject and goes on.

    `code` is a short stable word for counting, `reason` the sentence for people.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
