"""The requested tensors: taps as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ..models.choices import Final as Final
from ..models.errors import UsageError

FINALS: tuple[str, ...] = get_args(Final)


@dataclass(frozen=True)
class Taps:
    """K boundaries of the residual stream and the norm states to take with them.

    Attributes:
        boundaries: strictly increasing, each 0..n; made by `models.layer_ids`.
        final: whether the tensor that enters (``pre``) or leaves (``post``) the final norm is taken too, or ``both``.
    """

    boundaries: tuple[int, ...]
    final: Final = "none"

    def __post_init__(self) -> None:
        if self.final not in FINALS:
            raise UsageError(f"final must be one of {', '.join(FINALS)}; got {self.final!r}.")

    @property
    def pre_norm(self) -> bool:
        return self.final in ("pre", "both")

    @property
    def post_norm(self) -> bool:
        return self.final in ("post", "both")

    @property
    def names(self) -> tuple[str, ...]:
        """Return one readable name a tap, in slot order: the boundaries, then pre-norm, then post-norm."""
        norms = [name for name, asked in (("pre-norm", self.pre_norm), ("post-norm", self.post_norm)) if asked]
        return tuple(f"boundary {b}" for b in self.boundaries) + tuple(norms)


def with_post_norm(final: Final) -> Final:
    """Return `final` with post-norm added."""
    return "both" if final in ("pre", "both") else "post"
