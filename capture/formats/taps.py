"""The layers of a data set in a trainer's own ids, or a refusal."""

from __future__ import annotations

from ...models.layer_ids import from_boundaries
from ..store import TapsDescription
from .errors import FormatError

EMBEDDINGS = 0
EMBEDDINGS_ID = -1


def output_ids(taps: TapsDescription, trainer: str) -> list[int]:
    """Ids of 0-based layer outputs for a trainer that has no id for the embeddings.

    Raises:
        FormatError: no layers at all, or the embeddings are among them.
    """
    require_layers(taps, trainer)
    if taps.has_embeddings:
        raise FormatError(
            f"{trainer} has no layer id for the embeddings, which this capture holds as boundary 0; capture without it."
        )
    return list(from_boundaries(taps.boundaries, "layer_output"))


def output_ids_with_embeddings(taps: TapsDescription, trainer: str) -> list[int]:
    """Ids of 0-based layer outputs for a trainer that calls the embeddings -1."""
    require_layers(taps, trainer)
    outputs = from_boundaries([b for b in taps.boundaries if b != EMBEDDINGS], "layer_output")
    return [EMBEDDINGS_ID, *outputs] if taps.has_embeddings else list(outputs)


def require_layers(taps: TapsDescription, trainer: str) -> None:
    """Raise FormatError where the capture holds no layer."""
    if not taps.boundaries:
        raise FormatError(f"{trainer} wants the states of decoder layers and this capture holds none.")


def require_three(taps: TapsDescription, trainer: str) -> None:
    """Raise FormatError unless there are exactly three layers."""
    if taps.K != 3:
        held = ", ".join(map(str, taps.boundaries))
        raise FormatError(f"{trainer} wants exactly three layers; this capture holds {taps.K} (boundaries {held}).")


def require_no_last(taps: TapsDescription, trainer: str, why: str) -> None:
    """Raise FormatError where the last layer is captured, which `trainer` gives another meaning or none."""
    if taps.has_last:
        raise FormatError(
            f"{trainer} cannot take layer id {taps.n - 1}, the last of {taps.n} layers: {why}. Capture without it."
        )
