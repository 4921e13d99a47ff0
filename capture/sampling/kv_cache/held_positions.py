"""Caches together with how many positions each of their rows holds, so that requests of different lengths can share a step.

Rows of different lengths are lined up at their ends: a shorter one has empty slots in front, which the attention mask leaves
out. Slots in front change no distance between two positions of a row, so windows and relative positions stay right. No token
is ever padded: each prompt fills a cache of its own before it is lined up with others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from ....models.errors import RunError
from .cache import crop, known_layers, merge, select, with_layers
from .layers import LayerKind, batch_dim, class_name, layer_tensors, with_tensors

_LINED_UP = {
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Layers whose tensors either count slots at their end, or have no slots."""


@dataclass(frozen=True)
class HeldPositions:
    """The cache of B requests.

    lengths: positions held for each request, in the last slots of its row.
    slots: slots of each row, empty ones in front included.
    """

    cache: Cache
    lengths: tuple[int, ...]
    slots: int

    @classmethod
    def nothing(cls, cache: Cache, B: int) -> "HeldPositions":
        """Return an empty cache for B requests."""
        return cls(cache, (0,) * B, 0)

    @property
    def is_ragged(self) -> bool:
        """Return whether a request has empty slots."""
        return min(self.lengths) < self.slots

    def attention_mask(self, S: int, device: torch.device) -> Tensor:
        """Return (B, slots + S) int64 for a step of S tokens: 0 at empty slots."""
        slot = torch.arange(self.slots + S)
        empty = self.slots - torch.tensor(self.lengths)
        return (slot >= empty[:, None]).to(device, torch.int64)

    def position_ids(self, S: int, device: torch.device) -> Tensor:
        """Return (B, S) int64 of a step of S tokens."""
        return (torch.tensor(self.lengths)[:, None] + torch.arange(S)).to(device)

    def grown(self, S: int) -> "HeldPositions":
        """Return what is held after a step of S tokens, which appended them to `cache`."""
        return HeldPositions(self.cache, tuple(length + S for length in self.lengths), self.slots + S)


def can_line_up(cache: Cache) -> bool:
    """Return whether every layer is of a class that `lined_up` knows how to shift."""
    return all(type(layer).__name__ in _LINED_UP for layer, _ in known_layers(cache))


def lined_up(parts: Sequence[HeldPositions]) -> HeldPositions:
    """Return the requests of all parts, in order, in one cache with as many slots as the longest of them needs.

    Raises:
        RunError: a layer that cannot be shifted.
    """
    lengths = tuple(length for part in parts for length in part.lengths)
    if len(parts) == 1 and parts[0].slots == max(lengths):
        return parts[0]
    layers = [known_layers(part.cache) for part in parts]
    joined = [
        _lined_up_layer(index, list(column), max(lengths)) for index, column in enumerate(zip(*layers, strict=True))
    ]
    return HeldPositions(with_layers(parts[0].cache, joined), lengths, max(lengths))


def of_equal_length(parts: Sequence[HeldPositions]) -> HeldPositions:
    """Return the requests of all parts, in order, in one cache; all hold the same number of positions.

    Raises:
        UsageError: they do not.
    """
    lengths = tuple(length for part in parts for length in part.lengths)
    return parts[0] if len(parts) == 1 else HeldPositions(merge([part.cache for part in parts]), lengths, lengths[0])


def kept(held: HeldPositions, rows: Sequence[int], drops: Sequence[int]) -> list[tuple[list[int], HeldPositions]]:
    """Some requests, each without its last positions: row `rows[i]` without `drops[i]` of them.

    Requests that lose equally many stay together; the result has one entry per such number, with the rows that are in it.

    Raises:
        RunError: the cache cannot go back.
    """
    everyone = list(range(len(held.lengths)))
    result = []
    for drop in sorted(set(drops)):
        chosen = [row for row, dropped in zip(rows, drops, strict=True) if dropped == drop]
        cache = held.cache if chosen == everyone else select(held.cache, chosen)
        lengths = tuple(held.lengths[row] - drop for row in chosen)
        result.append((chosen, HeldPositions(crop(cache, drop), lengths, held.slots - drop)))
    return result


def _lined_up_layer(index: int, layers: list[tuple[object, LayerKind]], slots: int) -> object:
    first, kind = layers[0]
    if type(first).__name__ not in _LINED_UP or len({class_name(layer) for layer, _ in layers}) > 1:
        raise RunError(f"layer {index} of the cache, a {type(first).__name__}, cannot be shifted to other slots.")
    columns = [_shifted(layer, kind, slots) for layer, _ in layers]
    joined = {name: torch.cat([column[name] for column in columns], dim=batch_dim(kind, name)) for name in columns[0]}
    result = with_tensors(first, kind, joined)
    if hasattr(result, "cumulative_length"):
        result.cumulative_length = slots
    return result


def _shifted(layer: object, kind: LayerKind, slots: int) -> dict[str, Tensor]:
    """Return the tensors of a layer, with empty slots in front or without what its next step does not need."""
    window = getattr(layer, "sliding_window", None)
    wanted = slots if window is None else min(slots, window - 1)
    return {name: _of_shape(name, tensor, wanted, layer) for name, tensor in layer_tensors(layer, kind).items()}


def _of_shape(name: str, tensor: Tensor, wanted: int, layer: object) -> Tensor:
    state, _, key = name.partition(".")
    if state == "recurrent_states":
        return tensor
    if state == "conv_states":
        width = next(size for known, size in vars(layer)["conv_kernel_size"].items() if str(known) == key)
        return _last(tensor, width, -1)
    return _last(tensor, wanted, -2)


def _last(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Return the last `count` places of a dimension, zeros in front where there are fewer."""
    missing = count - tensor.shape[dim]
    if missing > 0:
        return pad(tensor, (0,) * (2 * (-1 - dim)) + (missing, 0))
    return tensor.narrow(dim, -missing, count)
