"""Error of a tap whose model does not give what it was attached for."""

from ..models.errors import RunError


class TapError(RunError):
    """A tap did not see exactly one tensor of the expected form; nothing of that forward is emitted."""
