"""Tensors on their way into a column: checked, contiguous, as bytes."""

import torch

from ...models.errors import UsageError
from .columns import Column
from .diskio import tensor_bytes


def column_bytes(column: Column, tensor: torch.Tensor, where: str) -> memoryview:
    """Return the bytes of `tensor` (n, *column.shape); contiguous memory is used as it is, a view of it is gathered once.

    where: which rows, for the error. Raises UsageError for a wrong dtype, shape or device.
    """
    if tensor.dtype != column.dtype:
        raise UsageError(
            f"{column.name}, {where}: expected dtype {column.dtype}, found {tensor.dtype}; convert it first."
        )
    if tensor.dim() != 1 + len(column.shape) or tuple(tensor.shape[1:]) != column.shape:
        expected = ", ".join(["n", *map(str, column.shape)])
        raise UsageError(f"{column.name}, {where}: expected shape ({expected}), found {tuple(tensor.shape)}.")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UsageError(
            f"{column.name}, {where}: expected a dense CPU tensor, found {tensor.device}, {tensor.layout}."
        )
    # A lazily negated view holds the memory of its opposite.
    return tensor_bytes(tensor.detach().resolve_neg().contiguous())
