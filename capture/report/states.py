"""The stored hidden states of a shard: which there are, in the order a token passes through them."""

from ..store import Shard, ShardDescription, StoredState


def states_of(shard: Shard) -> tuple[StoredState, ...]:
    """Return the states that a shard holds, by boundary, the norm's input and output last."""
    return ordered_states(shard.description, shard.shapes)


def ordered_states(description: ShardDescription, shapes: dict[str, tuple[int, ...]]) -> tuple[StoredState, ...]:
    """Return the states among columns of these shapes, by boundary, the norm's input and output last."""
    return tuple(sorted(description.states(shapes), key=lambda state: (state.slot is None, state.boundary or 0)))
