"""The fault of a whole source."""

from ...models.errors import RunError


class SourceError(RunError):
    """A source is missing, damaged or not what its name says; the run ends, since its rows cannot all be counted."""
