"""The tensors of a checkpoint as the headers of its files list them, read without their values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .checkpoint import CheckpointError, weight_map
from .safetensors_dtypes import DTYPE_NAMES

# In a safetensors header's words; those of ids and positions (I64, BOOL) are no integers of quantized weights.
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        dtype: as a safetensors header spells it, such as ``BF16`` or ``F8_E4M3``.
        shape: as stored.
        file: the file that holds it.
        bytes: of its values in the file.
        start: where they begin in a safetensors file; 0 in another one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    bytes: int
    start: int = 0

    @property
    def is_narrow_float(self) -> bool:
        """Return whether it is a float of 8 bits or fewer."""
        return self.dtype.startswith(("F8", "F4", "F6"))

    @property
    def is_integer(self) -> bool:
        return self.dtype in _INTEGERS

    def read(self) -> Tensor:
        """Read its values, on the CPU, in the stored dtype."""
        if self.file.suffix == ".safetensors":
            with safe_open(self.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(self.name)
                return tensor
        return _pickled(self.file)[self.name]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the weight files in `folder` that transformers would load, by name; {} where there are none.

    Raises:
        CheckpointError: a file does not open.
    """
    return {stored.name: stored for path in weight_files(folder) for stored in _tensors_of(path)}


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files in `folder` in transformers' order of preference: safetensors first, an index before one file."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if (folder / stem).is_file():
            return (folder / stem,)
        if index.is_file():
            return tuple(folder / name for name in sorted(set(weight_map(index).values())) if (folder / name).is_file())
    return ()


def place(name: str) -> str:
    """Return the end of a weight's name that stays when a class is renamed: from the list that holds the layer's number on.

    Example:
        >>> place("language_model.model.layers.3.mlp.up_proj.weight")
        'layers.3.mlp.up_proj.weight'
    """
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[max(0, (len(parts) - 2 if first is None else first - 1)) :])


def tensors_of_file(path: Path) -> Iterator[StoredTensor]:
    """Yield what the header of a safetensors file lists.

    Raises:
        CheckpointError: it cannot be opened, its header is damaged, or it is shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 8 + length <= size else None
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path} cannot be opened as a safetensors file ({error}); fetch the model again."
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has no safetensors header; fetch the model again.")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        if 8 + length + stop > size:
            raise CheckpointError(
                f"{path} has {size} bytes, but {name} ends at {8 + length + stop}; fetch the model again."
            )
        yield StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, stop - start, 8 + length + start)


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    if path.suffix == ".safetensors":
        yield from tensors_of_file(path)
        return
    try:
        for name, tensor in _pickled(path).items():
            shape = tuple(tensor.shape)
            yield StoredTensor(
                name, DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), shape, path, math.prod(shape) * tensor.itemsize
            )
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be opened ({error}); fetch the model again.") from error


def _pickled(path: Path) -> Mapping[str, Tensor]:
    # Mapped, so that values are read where they are looked at; weights_only runs no code of the file.
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
