"""The same weights in float32, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Weights and buffers of half precision are float32 inside the block, and what they were after it: both ways exact.

    Takes twice the memory of the weights in place of a second model beside the first. Those on the meta device stay.
    """
    narrow = (torch.bfloat16, torch.float16)
    before = [
        (tensor, tensor.dtype)
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.dtype in narrow and tensor.device.type != "meta"
    ]
    try:
        for tensor, _ in before:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in before:
            tensor.data = tensor.data.to(dtype)
