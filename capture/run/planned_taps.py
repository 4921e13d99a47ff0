"""The taps of a run, as a dry run shows them before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

from .attached_model import AttachedModel
from .settings import CaptureSettings


@dataclass(frozen=True)
class PlannedTap:
    """One tap of a run.

    Attributes:
        name: in the words of the ids that were asked for: ``layer 14``, ``boundary 15``, ``pre-norm``.
        boundary: how many decoder layers lie before it.
        reads: the tensor that it takes, such as ``output of model.layers.14``.
    """

    name: str
    boundary: int
    reads: str


def planned_taps(settings: CaptureSettings, attached: AttachedModel) -> tuple[PlannedTap, ...]:
    """Return the taps of a run in slot order, the norm states last; needs no weights."""
    decoder, taps = attached.decoder, attached.taps
    norm = attached.norm_path or "the final norm"
    sites = [decoder.site(boundary) for boundary in taps.boundaries]
    reads = [f"{'input' if site.at_input else 'output'} of {site.path}" for site in sites]
    reads += [f"{side} of {norm}" for side, asked in (("input", taps.pre_norm), ("output", taps.post_norm)) if asked]
    boundaries = (*taps.boundaries, *(decoder.n for _ in reads[len(sites) :]))
    return tuple(map(PlannedTap, settings.tap_names(taps), boundaries, reads))
