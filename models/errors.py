"""The errors that a user can cause, each one sentence that says what was expected, what was found and what to do."""


class HiddentapError(Exception):
    """Base of every error this package raises on purpose; the command prints its text alone, without a traceback.

    `exit_code` is what the command ends with: 2 for wrong use, 1 for a run that failed.
    """

    exit_code = 2


class UsageError(HiddentapError, ValueError):
    """A value given by the caller cannot be used as it is."""


class RunError(HiddentapError, RuntimeError):
    """Something failed while the work was under way."""

    exit_code = 1
