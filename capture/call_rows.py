"""Which rows a captured call makes: what came in, which positions are real, how many the cache holds already."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..hooks import PositionsError, RealPositions, lone_pad_id, real_positions
from ..models.call import cache_in
from ..models.errors import UsageError
from ..models.images import Expansion, own_expansion
from .outputs import DeviceHiddenStates, RowLayout

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
    expansion: Expansion | None = None

    @torch.no_grad()
    def hidden_states(self, states: tuple[Tensor, ...]) -> DeviceHiddenStates:
        """The real rows of K states (B, S, H) as one auxiliary output; no gradient flows through it."""
        flat = [state.detach().reshape(-1, state.shape[-1]) for state in states]
        rows = torch.stack([state.to(flat[0].device) for state in flat], 1)
        if not self.positions.all_real:
            rows = rows.index_select(0, self.positions.flat_index().to(rows.device))
        lengths = self.positions.lengths
        # Rows that follow a cache were sampled or are a later chunk; whoever runs a chunked prefill counts them as prompt itself.
        prompt = tuple(length if held == 0 else 0 for length, held in zip(lengths, self.before, strict=True))
        return DeviceHiddenStates({"aux_hidden_states": rows}, RowLayout(lengths, self.before, prompt))


def rows_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], config: Any, counted: MutableMapping[Any, int]
) -> CallRows:
    """The rows of a call with these arguments; takes `lengths` and the plain mask out of `kwargs`.

    To be asked before the call, which fills the cache.

    Args:
        counted: positions that earlier captured calls put into caches which cannot tell how many they hold.

    Raises:
        UsageError: neither ids nor embeddings came in.
        PositionsError: nothing sound tells which positions are real.
    """
    lengths, plain_mask = kwargs.pop("lengths", None), kwargs.pop(PLAIN_MASK, None)
    ids, (B, S) = _batch(args, kwargs)
    mask = kwargs.get("attention_mask") if plain_mask is None else plain_mask
    positions = real_positions(ids, B, S, lengths=lengths, attention_mask=mask, lone_pad_id=lone_pad_id(config))
    expansion = own_expansion(config, ids, kwargs)
    if expansion is not None:
        positions = positions.expanded(expansion)
    return CallRows(positions, _before(kwargs, mask, B, positions.S, counted), expansion)


def _batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, tuple[int, int]]:
    ids = args[0] if args else kwargs.get("input_ids")
    source = ids if ids is not None else kwargs.get("inputs_embeds")
    if not isinstance(source, Tensor) or source.ndim < 2:
        raise UsageError("a captured call needs input_ids (B, S) or inputs_embeds (B, S, H).")
    return ids, (int(source.shape[0]), int(source.shape[1]))


def _before(kwargs: Mapping[str, Any], mask: Any, B: int, S: int, counted: MutableMapping[Any, int]) -> tuple[int, ...]:
    held = _held(cache_in(kwargs), S, counted)
    if held and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == held + S:
        return tuple((mask[:, :held] != 0).sum(1).tolist())
    return (held,) * B


def _held(cache: Any, S: int, counted: MutableMapping[Any, int]) -> int:
    """How many positions `cache` holds. One of recurrent states alone cannot tell, so captured calls count for it."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        try:
            return int(cache.get_seq_length())
        except ValueError:  # transformers' way to say that a cache has no layer that counts
            return _counted(cache, S, counted)
    raise PositionsError(
        f"the cache is a {type(cache).__name__}, which cannot tell how many positions it holds, so the rows of this call have no "
        "known place; capture without a cache."
    )


def _counted(cache: Any, S: int, counted: MutableMapping[Any, int]) -> int:
    held = counted.get(cache)
    if held is None and _has_state(cache):
        raise PositionsError(
            f"the {type(cache).__name__} holds the state of positions that were not captured and cannot tell how many; "
            "capture from the first call on."
        )
    counted[cache] = (held or 0) + S
    return held or 0


def _has_state(cache: Any) -> bool:
    has_previous_state = getattr(cache, "has_previous_state", False)
    return bool(has_previous_state() if callable(has_previous_state) else has_previous_state)
