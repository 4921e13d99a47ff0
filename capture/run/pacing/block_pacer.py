"""A pacer that runs many batches at once, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ....models.streaming import StreamedNeeds
from ...outputs import DeviceAuxiliaryOutput
from ..batches import TokenBatch


@dataclass(frozen=True)
class BlockTimes:
    """Measurements of one block.

    Attributes:
        positions: of its batches, padding included.
        bytes_read: of the checkpoint.
        loading, computing: seconds of reading and converting layers, and of forwards; they overlap.
    """

    positions: int
    bytes_read: int
    loading: float
    computing: float


@runtime_checkable
class BlockPacer(Protocol):
    """A pacer that runs many batches at once, those of a block: each layer of the model for all of them, then the next.

    Attributes:
        block_tokens: positions of a block, padding included; a block is one shard at least.
    """

    block_tokens: int

    def forward_block(
        self, batches: Sequence[TokenBatch], check_stop: Callable[[], None]
    ) -> list[DeviceAuxiliaryOutput]:
        """Return what the forward of each batch gave, in order; `check_stop` is called between layers and may raise."""

    def limit_block(self, failed: int) -> None:
        """Make later blocks smaller: one of `failed` positions did not fit the device."""

    def times(self, batches: Sequence[TokenBatch]) -> BlockTimes:
        """Run `batches` as a block, drop what they gave, and return what it took."""

    @property
    def needs(self) -> StreamedNeeds:
        """What the model takes in memory whatever the block, and on disk."""

    @property
    def state_bytes(self) -> int:
        """Bytes that one position of a block takes between two layers."""
