"""Faults of one input record, and of a whole source."""

from ...models.errors import HiddentapError, RunError, UsageError

TIMEOUT_CODE = "too_slow"
MEMORY_CODE = "too_large"


class RecordError(HiddentapError):
    """One input row cannot become a sample; the run turns it into a reject and goes on.

    `code` is a short stable word for counting, `reason` the sentence for people.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class SourceError(RunError):
    """A source is missing, damaged or not what its name says; the run ends, since its rows cannot all be counted."""


class NoSourceError(SourceError):
    """The name of a source leads to nothing that can be read; a wrong name is wrong use."""

    exit_code = 2


class BrokenTemplateError(UsageError):
    """A chat template that renders no conversation at all, since Jinja cannot read it."""


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
