"""Decoder layers compiled one by one, with the hooks outside of what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..models.decoder import Decoder


@contextmanager
def compiled_layers(decoder: Decoder) -> Iterator[None]:
    """Compile each decoder layer's `forward` inside the block, with dynamic shapes; restore it afterwards.

    The forward and not the call: hooks run around it, as they do on a layer that is not compiled, so they are never traced and
    never missed. Layers of one class share one graph.
    """
    before = [(layer, layer.__dict__.get("forward")) for layer in decoder.layers]
    for layer, _ in before:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for layer, forward in before:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
