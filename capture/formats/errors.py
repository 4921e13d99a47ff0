"""Errors of exports and imports."""

from ...models.errors import RunError, UsageError


class FormatError(UsageError):
    """A request that a trainer's layout cannot hold, or that lacks something the layout needs; says what and why."""


class LayoutError(RunError):
    """Files that are not of the layout they were said to be, or rows that do not fit into it; says which and where."""


class SampleError(Exception):
    """One sample of a foreign data set that cannot be taken over; the import goes on without it."""
