"""The stored hidden states of a shard: which there are, in the order a token passes through them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..store import Shard


@dataclass(frozen=True)
class State:
    """One tensor of H values per row.

    label: as a person calls it: ``layer 14``, ``boundary 15``, ``pre-norm``.
    column, slot: where its rows are; slot is None where the column holds this state alone.
    boundary: how many decoder layers lie before it; None where the shard does not say, and for post-norm.
    """

    label: str
    column: str
    slot: int | None
    boundary: int | None


def states_of(shard: Shard) -> tuple[State, ...]:
    """The states that a shard holds, by boundary, the norm's input and output last."""
    return named_states({column.name: column.shape for column in shard.columns}, shard.metadata)


def named_states(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, Any]) -> tuple[State, ...]:
    """The states among columns of these shapes, the first dimension left out, named as `metadata` says."""
    taps = metadata.get("taps")
    taps = taps if isinstance(taps, Mapping) else {}
    layers = _layers(shapes["aux_hidden_states"][0], taps) if "aux_hidden_states" in shapes else []
    if "pre_norm" in shapes:
        layers.append(State("pre-norm", "pre_norm", None, taps.get("num_hidden_layers")))
    if "post_norm" in shapes:
        layers.append(State("post-norm", "post_norm", None, None))
    return tuple(layers)


def rows_of(state: State, columns: Mapping[str, Tensor]) -> Tensor:
    """(T, H) float32 of a state, out of the T rows of every column."""
    rows = columns[state.column]
    return (rows if state.slot is None else rows[:, state.slot]).to(torch.float32)


def _layers(K: int, taps: Mapping[str, Any]) -> list[State]:
    ids, boundaries = taps.get("layer_ids"), taps.get("boundaries")
    if not ids or not boundaries or len(ids) != K or len(boundaries) != K:
        return [State(f"slot {slot}", "aux_hidden_states", slot, None) for slot in range(K)]
    word = "boundary" if taps.get("convention") == "boundary" else "layer"
    found = [State(f"{word} {ids[slot]}", "aux_hidden_states", slot, int(boundaries[slot])) for slot in range(K)]
    return sorted(found, key=lambda state: state.boundary or 0)
