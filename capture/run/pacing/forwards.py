"""Samples run batch by batch, each as large as the device holds: those of a shard, or those that a dry run times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from ....models.errors import RunError
from ....models.length_limits import LengthLimits
from ...outputs import DeviceAuxiliaryOutput
from ..batches import BatchRule, Place, SampleRows, TokenBatch
from .block_pacer import BlockPacer
from .device_memory import make_room, too_large, unless_out_of_memory
from .pace import Pacer


class HasRows(Protocol):
    """Something with samples to run."""

    @property
    def rows(self) -> SampleRows: ...


S = TypeVar("S", bound=HasRows)
Ran = tuple[TokenBatch, DeviceAuxiliaryOutput]


@dataclass(frozen=True)
class Forwards:
    """Cuts samples into batches and runs them.

    Attributes:
        pacer: how large each batch is, and what runs it.
        device: what the batches run on.
        limits, chunk: lengths that keep samples apart, and those that run in chunks; see `BatchRule`.
        note: takes one line worth reading.
    """

    pacer: Pacer
    device: torch.device
    limits: LengthLimits
    note: Callable[[str], None]
    chunk: int | None = None

    @property
    def _rule(self) -> BatchRule:
        return BatchRule(self.pacer.most_padding, self.limits, self.chunk)

    def of_shards(self, shards: Iterable[S], check_stop: Callable[[], None]) -> Iterator[tuple[S, Iterator[Ran]]]:
        """Yield each shard with its batches and what their forwards gave; `check_stop` may raise, between forwards."""
        if not isinstance(self.pacer, BlockPacer):
            for shard in shards:
                yield shard, self.over(shard.rows, check_stop)
            return
        waiting: list[S] = []
        for shard in shards:
            waiting.append(shard)
            if sum(len(one.rows.input_ids) for one in waiting) >= self.pacer.block_tokens:
                yield from self._block(self.pacer, waiting, check_stop)
                waiting = []
        yield from self._block(self.pacer, waiting, check_stop)

    def _block(
        self, pacer: BlockPacer, shards: Sequence[S], check_stop: Callable[[], None]
    ) -> Iterator[tuple[S, Iterator[Ran]]]:
        """Yield what `over` yields for each of `shards`, run together; a block that does not fit the device is halved."""
        if not shards:
            return
        batches = [self.cut(shard.rows) for shard in shards]
        flat = [batch for cut in batches for batch in cut]
        outputs = unless_out_of_memory(partial(pacer.forward_block, flat, check_stop))
        if outputs is None:
            self._lower_block(pacer, shards, flat)
            half = (len(shards) + 1) // 2
            yield from self._block(pacer, shards[:half], check_stop)
            yield from self._block(pacer, shards[half:], check_stop)
            return
        ran = iter(zip(flat, outputs, strict=True))
        for shard, cut in zip(shards, batches, strict=True):
            yield shard, iter([next(ran) for _ in cut])

    def cut(self, samples: SampleRows) -> list[TokenBatch]:
        """Return all batches of `samples`."""
        cut, place = [], Place(0)
        while place.sample < samples.M:
            cut.append(samples.batch(place, self.pacer.next_size(), self._rule))
            place = cut[-1].next
        return cut

    def _lower_block(self, pacer: BlockPacer, shards: Sequence[S], batches: Sequence[TokenBatch]) -> None:
        positions = sum(batch.positions.B * batch.positions.S for batch in batches)
        make_room(self.device)
        if len(shards) > 1:
            pacer.limit_block(positions)
            self.note(f"a block of {positions} positions did not fit {self.device}; trying smaller ones")
            return
        largest = max(batches, key=lambda batch: batch.positions.B * batch.positions.S)
        if largest.positions.B == 1:
            raise RunError(
                f"the states of one shard, {positions} positions, do not fit the memory of {self.device} between two layers; "
                "lower --shard-rows, or --max-length."
            )
        self._lower(shards[0].rows, largest)

    def over(
        self, samples: SampleRows, check_stop: Callable[[], None]
    ) -> Iterator[tuple[TokenBatch, DeviceAuxiliaryOutput]]:
        """Yield every batch of `samples` with what its forward gave; `check_stop` is called between them and may raise.

        Raises:
            RunError: a sample, or a chunk of one, does not fit the device even alone; the message names it.
        """
        place = Place(0)
        while place.sample < samples.M:
            check_stop()
            batch, output = self._at(samples, place)
            yield batch, output
            place = batch.next

    def run(self, samples: SampleRows, first: int) -> int:
        """Run the batch that begins with sample `first`, or all chunks of that sample; return how many tokens ran.

        Raises:
            RunError: as `over`.
        """
        batch, _ = self._at(samples, Place(first))
        tokens = batch.positions.T
        while not batch.ends_samples:
            batch, _ = self._at(samples, batch.next)
            tokens += batch.positions.T
        return tokens

    def _at(self, samples: SampleRows, place: Place) -> tuple[TokenBatch, DeviceAuxiliaryOutput]:
        """Return the batch that begins at `place` and what its forward gave; one that does not fit is halved.

        Raises:
            RunError: the sample, or a chunk of it, does not fit even alone; the message names it.
        """
        while True:
            size = self.pacer.next_size()
            batch = samples.batch(place, size, self._rule)
            output = unless_out_of_memory(partial(self.pacer.forward, batch, size))
            if output is not None:
                return batch, output
            self._lower(samples, batch)

    def _lower(self, samples: SampleRows, batch: TokenBatch) -> None:
        positions = batch.positions
        if positions.B == 1:
            raise too_large(samples.ids[batch.first], batch, self.device)
        failed = positions.B * positions.S
        self.pacer.limit(failed)
        make_room(self.device)
        self.note(f"a batch of {failed} positions did not fit {self.device}; trying smaller ones")
