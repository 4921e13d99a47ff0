"""A safetensors file of known tensors, filled piece by piece; what is never filled is zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ...models.errors import UsageError
from ..store.diskio import UnsealedFile, tensor_bytes
from ..store.header import build_header, place_tensors

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class PaddedTensorFile:
    """Places the tensors, takes their pieces in any order, and gives the file its name at `seal`.

    So a shard of padded samples needs the memory of one piece, and its padding is never written.

    Raises:
        DiskFullError: there is no room; known before the first piece.
    """

    def __init__(self, path: Path, shapes: Shapes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._entries = {e.name: e for e in place_tensors((n, dtype, shape) for n, (dtype, shape) in shapes.items())}
        self._header = build_header(self._entries.values(), None)
        # A run that was killed may have left it; the caller holds the folder's lock.
        path.with_name(path.name + ".open").unlink(missing_ok=True)
        self._file = UnsealedFile(path)
        try:
            self._file.reserve(8 + len(self._header) + max(entry.stop for entry in self._entries.values()))
        except BaseException:
            self._file.discard()
            raise

    def write(self, name: str, rows: Tensor, *at: int) -> None:
        """Put `rows` into tensor `name` at the place that `at`, indices of its leading dimensions, begins."""
        entry = self._entries[name]
        if rows.dtype != entry.dtype:
            raise UsageError(f"{name} is {entry.dtype}, got {rows.dtype}; convert it first.")
        strides = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(at))]
        first = sum(index * stride for index, stride in zip(at, strides, strict=True))
        offset = 8 + len(self._header) + entry.start + first * entry.dtype.itemsize
        self._file.write(tensor_bytes(rows.contiguous()), offset)

    def seal(self) -> None:
        """Write the header and give the file its name."""
        self._file.seal(self._header)

    def __enter__(self) -> PaddedTensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of whole tensors."""
    with PaddedTensorFile(
        path, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    ) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
        file.seal()
