"""Whether a position sees only what came before it, which makes rows exact in batches padded on the right without a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.call import eagerly, few_ids, without_cache
from ..models.decoder import Decoder
from .collector import Collector
from .errors import TapError
from .slots import ClonedStates

# Rows of a causal model can move by a rounding (another expert's group, another kernel), never by this much.
MOST_CHANGE = 1e-2


@torch.no_grad()
def require_causal(decoder: Decoder, collector: Collector) -> None:
    """Run the model twice on a few tokens, the last one changed, and see that no earlier row moves.

    Raises:
        TapError: one did, by more than a rounding.
    """
    ids = few_ids(decoder.model, decoder.vocab_rows, 2, 5)
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    states, changed = (_states(decoder, collector, tokens) for tokens in (ids, other))
    for name, before, after in zip(collector.taps.names, states, changed, strict=True):
        a, b = before[:, :-1].double(), after[:, :-1].double()
        change = (torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(a, dim=-1).clamp_min(1e-30)).max()
        if change > MOST_CHANGE:
            raise TapError(
                f"{name} of {type(decoder.model).__name__} changes by {float(change):.2g} of its length when only a later token "
                "changes, so the model is not causal as it is configured and its rows would depend on padding. Run one sample a "
                "forward (--exact), or configure it as a decoder."
            )


def _states(decoder: Decoder, collector: Collector, ids: Tensor) -> list[Tensor]:
    slots = ClonedStates(len(collector.taps.names))
    collector.attach()
    try:
        with collector.armed(slots, *ids.shape, stop=True), eagerly(decoder.model):
            decoder.model(ids, **without_cache(decoder.model))
    finally:
        collector.detach()
    return [state for state in slots.states if state is not None]
