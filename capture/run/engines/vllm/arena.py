"""Memory for the rows of one batch, shared by the processes of one machine and by no file system."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What a row's token id is before the row was written: no token has it.
UNWRITTEN = -1
_ALIGNED = 64


@dataclass(frozen=True)
class ArenaShape:
    """R rows of K states, H wide.

    Attributes:
        dtype: of the states, as torch calls it, such as ``bfloat16``.
    """

    R: int
    K: int
    H: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def ids_bytes(self) -> int:
        """Bytes of the token ids, which come first, up to where the states begin."""
        return -(-4 * self.R // _ALIGNED) * _ALIGNED

    @property
    def nbytes(self) -> int:
        return self.ids_bytes + self.R * self.K * self.H * self.torch_dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        return {"R": self.R, "K": self.K, "H": self.H, "dtype": self.dtype}


class RowArena:
    """Rows by place: who writes one says which token it was computed from.

    Attributes:
        token_ids: (R,) int32, `UNWRITTEN` where no row is.
        states: (R, K, H).
    """

    def __init__(self, shape: ArenaShape, descriptor: int) -> None:
        """Takes `descriptor`, that of a file of `shape.nbytes` bytes, as its own."""
        self.shape, self._descriptor = shape, descriptor
        memory = mmap.mmap(descriptor, shape.nbytes)
        self.token_ids = torch.frombuffer(memory, dtype=torch.int32, count=shape.R)
        states = torch.frombuffer(memory, dtype=torch.uint8, offset=shape.ids_bytes).view(shape.torch_dtype)
        self.states = states.view(shape.R, shape.K, shape.H)

    @classmethod
    def make(cls, shape: ArenaShape) -> RowArena:
        """New memory without a name; it is gone with the last process that has it."""
        descriptor = os.memfd_create("hiddentap-rows")
        os.ftruncate(descriptor, shape.nbytes)
        return cls(shape, descriptor)

    @classmethod
    def at(cls, path: str, shape: ArenaShape) -> RowArena:
        """Map the memory at `path`, which this or another process created."""
        return cls(shape, os.open(path, os.O_RDWR))

    @property
    def path(self) -> str:
        """Return the path under which other processes of this user find the memory while this one lives."""
        return str(Path("/proc", str(os.getpid()), "fd", str(self._descriptor)))

    def clear(self, T: int) -> None:
        """Say of the first T rows that none is written."""
        self.token_ids[:T] = UNWRITTEN

    def write(self, first: int, token_ids: Tensor, states: Tensor) -> None:
        """Put rows in their place; token_ids: (S,), states: (S, K, H), on any device."""
        stop = first + len(token_ids)
        self.states[first:stop].copy_(states)
        self.token_ids[first:stop] = token_ids

    def close(self) -> None:
        """Give the descriptor back; the memory itself goes with the last tensor on it."""
        os.close(self._descriptor)
