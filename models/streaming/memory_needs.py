"""Needs of streamed weights: bytes in memory that do not depend on the block, and bytes that are read for each block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..decoder import Decoder
from ..stored_tensors import StoredTensor


@dataclass(frozen=True)
class StreamedNeeds:
    """Bytes that a model with streamed weights takes beside the states of a block, and that it reads.

    Attributes:
        layer: of the largest decoder layer, as it is computed with.
        outside: of the weights outside the layers, as they are computed with.
        layers_on_disk: of each layer, as stored.
    """

    layer: int
    outside: int
    layers_on_disk: tuple[int, ...]

    @property
    def memory(self) -> int:
        """Return the bytes of the layer that computes, the one that is read meanwhile, and the parts outside the layers."""
        return 2 * self.layer + self.outside

    @classmethod
    def of_skeleton(cls, decoder: Decoder, stored: Iterable[StoredTensor], itemsize: int) -> StreamedNeeds:
        """Return those of a model that is not loaded; its output head stays out, as in a run without `--head`.

        itemsize: bytes of a weight as it is computed with.
        """
        inside = [_weights(layer) for layer in decoder.layers]
        everything = {id(p): p.numel() for p in decoder.model.parameters()}
        within = {id(p) for layer in decoder.layers for p in layer.parameters()}
        head = set(map(id, _head_alone(decoder.model)))
        outside = sum(count for key, count in everything.items() if key not in within and key not in head)
        return cls(max(inside) * itemsize, outside * itemsize, _on_disk(decoder, stored))


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _head_alone(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the output head that are no embeddings too."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False)) and embeddings is not None
    return [] if head is None or tied else list(head.parameters())


def _on_disk(decoder: Decoder, stored: Iterable[StoredTensor]) -> tuple[int, ...]:
    """Return the bytes of each layer in the checkpoint, which may call the list by another path than the model does.

    Of the lists with that last name (a vision tower may have one too) the decoder's is the one with the most bytes. Layers
    past the model's n, as those that predict further tokens, are not read.
    """
    numbered = re.compile(rf"^(.*?)\b{re.escape(decoder.layers_path.rpartition('.')[2])}\.(\d+)\.")
    lists: dict[str, list[int]] = {}
    for tensor in stored:
        found = numbered.match(tensor.name)
        if found is not None and int(found[2]) < decoder.n:
            lists.setdefault(found[1], [0] * decoder.n)[int(found[2])] += tensor.bytes
    most: Sequence[int] = max(lists.values(), key=sum, default=())
    return tuple(most)
