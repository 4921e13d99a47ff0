"""Weights of which this process holds a part."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`. Every process that holds a part of it must ask at once."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def address(tensor: Tensor) -> int:
    """Where the memory of this process's part begins; two weights that are tied have one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
