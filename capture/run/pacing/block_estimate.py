"""Estimate of what a run with streamed weights reads and holds, and of its time, from one block of its own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from ..batches import TokenBatch
from .block_pacer import BlockPacer


@dataclass(frozen=True)
class BlockEstimate:
    """The blocks of a run.

    Attributes:
        tokens, batches: of one block; the last one may be smaller.
        blocks: how many.
        bytes_per_block, bytes_read: of the checkpoint: for each block, and for all of them.
        layer_bytes: of the largest layer; two of them are in memory, the one that computes and the next.
        outside_bytes, state_bytes: of the weights outside the layers, and of the states of a block between two layers.
        read_rate: bytes/s at which layers were read and converted.
        seconds: of all blocks.
    """

    tokens: int
    batches: int
    blocks: int
    bytes_per_block: int
    bytes_read: int
    layer_bytes: int
    outside_bytes: int
    state_bytes: int
    read_rate: float
    seconds: float

    @property
    def memory(self) -> int:
        return 2 * self.layer_bytes + self.outside_bytes + self.state_bytes


def block_estimate(pacer: BlockPacer, batches: Sequence[TokenBatch], tokens: int, shard_rows: int) -> BlockEstimate:
    """Run `batches` as one block, and scale what they took to a run of `tokens` tokens in shards of `shard_rows` rows.

    A layer is read while the one before it computes, so a block takes the longer of both.
    """
    times, needs = pacer.times(batches), pacer.needs
    shards = ceil(pacer.block_tokens / shard_rows)  # a block is whole shards
    block = min(tokens, shards * shard_rows)
    blocks = ceil(tokens / block)
    tried = sum(batch.positions.T for batch in batches)
    seconds = blocks * max(times.loading, times.computing / tried * tokens / blocks)
    return BlockEstimate(
        tokens=block,
        batches=ceil(block / tried * len(batches)),
        blocks=blocks,
        bytes_per_block=times.bytes_read,
        bytes_read=blocks * times.bytes_read,
        layer_bytes=needs.layer,
        outside_bytes=needs.outside,
        state_bytes=ceil(block * times.positions / tried) * pacer.state_bytes,
        read_rate=times.bytes_read / max(times.loading, 1e-9),
        seconds=seconds,
    )
