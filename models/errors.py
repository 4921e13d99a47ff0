"""The errors that a user can cause, each one sentence that says what was expected, what was found and what to do."""


class HiddentapError(Exception):
    """Base of every error this package raises on purpose; the command prints its text alone, without a traceback.

    Attributes:
        exit_code: of the command: 2 for wrong use, 1 for a run that failed.

    Example:
        >>> try:
        ...     CapturedDataset("chats.jsonl")
        ... except HiddentapError as error:
        ...     error.exit_code
        1
    """

    exit_code = 2


class UsageError(HiddentapError, ValueError):
    """A value given by the caller cannot be used as it is."""


class UsageTypeError(UsageError, TypeError):
    """A value given by the caller is of a type that cannot be used."""


class RunError(HiddentapError, RuntimeError):
    """Something failed while the work was under way."""

    exit_code = 1
