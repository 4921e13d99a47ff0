"""Equality of tensors bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two floating tensors are equal bit for bit: NaN equals NaN, and 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = _AS_INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.detach().to(a.device).contiguous().view(integers))
