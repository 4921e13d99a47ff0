"""The rows of a captured call: its input, its real positions, and how many the cache holds already."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...hooks import Company, Held, PositionsError, RealPositions, has_state, lone_pad_id, real_before, real_positions
from ...models.call import cache_in
from ...models.errors import UsageError
from ...models.images import OwnExpansion, own_expansion, placeholder_id
from ..outputs import DeviceHiddenStates, RowLayout

# What `prepare_inputs_for_generation` of a mixin model adds: the (B, W) mask, where a compilable cache gets a 4-D one.
PLAIN_MASK = "capture_attention_mask"


@dataclass(frozen=True)
class CallRows:
    """The rows of one call.

    Attributes:
        positions: the real positions of its (B, S) batch.
        before: real positions of each row that the cache holds already.
        expansion: what the model makes of its ids, where it puts image features in the place of placeholders itself.
    """

    positions: RealPositions
    before: tuple[int, ...]
    expansion: OwnExpansion | None = None

    @torch.no_grad()
    def hidden_states(self, states: tuple[Tensor, ...]) -> DeviceHiddenStates:
        """Return the real rows of K states (B, S, H) as one auxiliary output; no gradient flows through it."""
        flat = [state.detach().reshape(-1, state.shape[-1]) for state in states]
        rows = torch.stack([state.to(flat[0].device) for state in flat], 1)
        if not self.positions.all_real:
            rows = rows.index_select(0, self.positions.flat_index().to(rows.device))
        lengths = self.positions.lengths
        # Rows that follow a cache were sampled or are a later chunk; whoever runs a chunked prefill counts them as prompt itself.
        prompt = tuple(length if held == 0 else 0 for length, held in zip(lengths, self.before, strict=True))
        return DeviceHiddenStates({"aux_hidden_states": rows}, RowLayout(lengths, self.before, prompt))


def rows_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], config: Any, counted: MutableMapping[Any, int], company: Company
) -> CallRows:
    """Return the rows of a call with these arguments; takes `lengths` and the plain mask out of `kwargs`.

    To be asked before the call, which fills the cache. Position ids are added to `kwargs` where padding on the left needs them.

    Args:
        company: proves that the rows of this call are those of their sequences alone.
        counted: positions that earlier captured calls put into caches which cannot tell how many they hold.

    Raises:
        UsageError: neither ids nor embeddings came in.
        PositionsError: nothing sound tells which positions are real.
        TapError: the model's rows depend on their company when it is run so.
    """
    lengths, plain_mask = kwargs.pop("lengths", None), kwargs.pop(PLAIN_MASK, None)
    ids, (B, S) = _batch(args, kwargs)
    mask = kwargs.get("attention_mask") if plain_mask is None else plain_mask
    cache = cache_in(kwargs)
    held = _held(cache, counted)
    if (
        isinstance(mask, Tensor)
        and mask.ndim == 2
        and S < mask.shape[1] < held.positions + S
        and placeholder_id(config)
    ):
        # The cache holds features of images, where the mask of generate() has one placeholder for each image.
        mask = torch.cat([mask.new_ones(B, held.positions + S - mask.shape[1]), mask], 1)
    positions = real_positions(
        ids, B, S, lengths=lengths, attention_mask=mask, lone_pad_id=lone_pad_id(config), held=held
    )
    expansion = own_expansion(config, ids, kwargs)
    if expansion is not None:
        positions = positions.expanded(expansion)
    before = real_before(mask, held.positions, B)
    kwargs |= company.arguments_for(positions, kwargs, mask, held.positions, before)
    if not _counts_itself(cache):
        counted[cache] = held.positions + positions.S
    return CallRows(positions, before, expansion)


def _batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, tuple[int, int]]:
    ids = args[0] if args else kwargs.get("input_ids")
    source = ids if ids is not None else kwargs.get("inputs_embeds")
    if not isinstance(source, Tensor) or source.ndim < 2:
        raise UsageError("a captured call needs input_ids (B, S) or inputs_embeds (B, S, H).")
    return ids, (int(source.shape[0]), int(source.shape[1]))


def _held(cache: Any, counted: Mapping[Any, int]) -> Held:
    """Return how many positions `cache` holds; for recurrent states alone, the positions of captured calls."""
    if _counts_itself(cache):
        return Held.by(cache)
    if cache not in counted and has_state(cache):
        raise PositionsError(
            f"the {type(cache).__name__} holds the state of positions that were not captured and cannot tell how many; "
            "capture from the first call on."
        )
    return Held(counted.get(cache, 0))


def _counts_itself(cache: Any) -> bool:
    if hasattr(cache, "get_seq_length"):
        try:
            cache.get_seq_length()
        except ValueError:  # transformers' way to say that a cache has no layer that counts
            return False
    return True
