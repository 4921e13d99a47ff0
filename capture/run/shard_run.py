"""Planned shards, from their tokens to their seals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...models.errors import RunError
from ..outputs import DeviceAuxiliaryOutput, HostCopy, PendingHostCopy, Rows
from ..progress import Progress
from ..store import Column, OutputFolder, Plan, PlannedShard, PlannedShardWriter, Shard, ShardSamples
from .background import Background
from .batches import TokenBatch, batch_end, token_batch
from .budget import make_room, too_large
from .engine import Engine
from .pace import Pace
from .planned_images import PlannedImages
from .row_faults import RowFault
from .settings import OnBadValues
from .steady_pace import SteadyPace

# Batches that may wait for the disk: enough to keep the forward busy through a seal, few enough to keep memory flat.
WAITING_BATCHES = 2


@dataclass
class SampleRequest:
    """One sample of a batch in the words of the auxiliary-output contract: a request whose rows are all prompt rows."""

    rid: str
    rows: PlannedRows
    output_ids: Sequence[int] = ()
    finished_len: int | None = None
    aborted: bool = False
    faults: list[RowFault] = field(default_factory=list)

    def report(self, faults: Sequence[RowFault]) -> None:
        self.faults.extend(faults)


@dataclass(frozen=True)
class SampleBatch:
    """The requests of one forward."""

    reqs: Sequence[SampleRequest]


@dataclass(frozen=True)
class PlannedRows:
    """The rows of one sample in a planned shard."""

    writer: PlannedShardWriter
    row_start: int

    def append(self, first_position: int, rows: Mapping[str, Rows]) -> None:
        self.writer.write(self.row_start + first_position, rows)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShardTokens:
    """What one shard is to hold beside its hidden states; input_ids (R,) int32, loss_mask (R,) uint8, in its rows' order.

    is_text: (R,) uint8 in a run with images, else None.
    """

    planned: PlannedShard
    samples: ShardSamples
    ids: Sequence[str]
    input_ids: Tensor
    loss_mask: Tensor
    is_text: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Those that are known before any forward."""
        known = {"input_ids": self.input_ids, "loss_mask": self.loss_mask}
        return known if self.is_text is None else known | {"is_text": self.is_text}


@dataclass
class ShardRun:
    """Captures shards: the forward in this thread; waiting for the copy, rows to disk and seals in one behind it.

    `pace` is None in an exact run: one sample a forward. `images` is None where no sample has any. `check_stop` is
    called between batches and may raise.
    """

    plan: Plan
    folder: OutputFolder
    engine: Engine
    columns: Sequence[Column]
    metadata: Mapping[str, Any]
    pace: Pace | SteadyPace | None
    on_bad_values: OnBadValues
    progress: Progress
    check_stop: Callable[[], None]
    images: PlannedImages | None = None

    def capture(self, shards: Iterable[PlannedShard]) -> dict[int, Shard]:
        """Fill and seal `shards` one after the other; returns them by index.

        Raises what the forward, the disk or `check_stop` raises, in whichever thread. Whatever could be sealed before that
        is, and the files of the other shards are gone.
        """
        sealed: dict[int, Shard] = {}
        writers: dict[int, PlannedShardWriter] = {}
        host_copy = HostCopy(self.engine.device)
        try:
            with Background(WAITING_BATCHES) as background:
                for planned in shards:
                    shard = self._tokens_of(planned)
                    for tokens, output in self._forwards(shard):
                        background.submit(partial(self._store, shard, writers, tokens, host_copy.start(output)))
                    background.submit(partial(self._seal, planned, writers, sealed))
        finally:
            for writer in writers.values():
                writer.discard()
        return sealed

    def _tokens_of(self, planned: PlannedShard) -> ShardTokens:
        samples = self.plan.samples_of(planned)
        ids = [samples.id(place) for place in range(planned.M)]
        is_text = None if self.images is None else self.plan.is_text_of(planned)
        return ShardTokens(planned, samples, ids, *self.plan.tokens_of(planned), is_text)

    def _forwards(self, shard: ShardTokens) -> Iterator[tuple[TokenBatch, DeviceAuxiliaryOutput]]:
        """Every batch of the shard with what its forward gave; a batch that does not fit the device is halved."""
        planned, first = shard.planned, 0
        while first < planned.M:
            self.check_stop()
            size = 1 if self.pace is None else self.pace.next_size()
            stop = batch_end(planned.lengths, first, size, self.pace.most_padding if self.pace else 0.0)
            tokens = self._batch(shard, first, stop)
            output = self._forward(tokens, size)
            if output is None:
                self._lower_budget(shard, tokens)
                continue
            yield tokens, output
            first = tokens.samples.stop

    def _batch(self, shard: ShardTokens, first: int, stop: int) -> TokenBatch:
        """Samples first..stop-1 as one batch, or fewer of them: one with images is alone in its forward."""
        planned = shard.planned
        if self.images is None:
            return token_batch(first, stop, planned.row_offsets, shard.input_ids)
        stop = self.images.stop_before(planned, first, stop)
        tokens = token_batch(first, stop, planned.row_offsets, shard.input_ids)
        begin, end = planned.row_offsets[first : first + 2].tolist()
        return replace(tokens, inputs=self.images.inputs(planned, first, shard.input_ids[begin:end].numpy()))

    def _forward(self, tokens: TokenBatch, size: int) -> DeviceAuxiliaryOutput | None:
        """What the forward gave; None where the batch did not fit the device.

        None and not the exception, which would hold the failed forward's memory while there is room to be made.
        """
        try:
            return self.engine.forward(tokens) if self.pace is None else self.pace.forward(tokens, size)
        except torch.OutOfMemoryError:
            return None

    def _lower_budget(self, shard: ShardTokens, tokens: TokenBatch) -> None:
        """After a batch that did not fit the device; raises RunError where it was one sample already."""
        positions = tokens.positions
        if self.pace is None or positions.B == 1:
            raise too_large(f"sample {shard.ids[tokens.first]!r} of {positions.S} tokens", self.engine.device)
        failed = positions.B * positions.S
        self.pace.limit(failed)
        make_room(self.engine.device)
        self.progress.note(f"a batch of {failed} positions did not fit {self.engine.device}; trying smaller ones")

    def _store(
        self, shard: ShardTokens, writers: dict[int, PlannedShardWriter], tokens: TokenBatch, pending: PendingHostCopy
    ) -> None:
        writer = writers.get(shard.planned.index) or self._open(shard, writers)
        offsets = shard.planned.row_offsets[tokens.samples.start : tokens.samples.stop].tolist()
        requests = [
            SampleRequest(shard.ids[place], PlannedRows(writer, offset))
            for place, offset in zip(tokens.samples, offsets, strict=True)
        ]
        try:
            pending.wait().consume(SampleBatch(requests), [None] * len(requests))
        except ExceptionGroup as failed:
            # One child of the composite failed, as a full disk does it: that error itself tells more than a group of one.
            if len(failed.exceptions) == 1:
                raise failed.exceptions[0] from None
            raise
        rejected = self._judge(writer, tokens, requests)
        B, T = tokens.positions.B, tokens.positions.T
        written = T * sum(column.row_bytes for column in self.columns)
        self.progress.advanced(B, T, written=written, rejected=rejected)

    def _open(self, shard: ShardTokens, writers: dict[int, PlannedShardWriter]) -> PlannedShardWriter:
        path = self.folder.shard_path(shard.planned.index)
        writer = PlannedShardWriter(path, shard.planned, shard.samples, self.columns, self.metadata)
        writers[shard.planned.index] = writer
        writer.write(0, shard.columns())
        return writer

    def _judge(self, writer: PlannedShardWriter, tokens: TokenBatch, requests: Sequence[SampleRequest]) -> int:
        """Reject the samples whose rows have faults, or do as the run was told; returns how many were rejected."""
        rejected = 0
        for place, request in zip(tokens.samples, requests, strict=True):
            if not request.faults:
                continue
            reason = "; ".join(str(fault) for fault in request.faults)
            if self.on_bad_values == "raise":
                raise RunError(f"sample {request.rid!r}: {reason}")
            if self.on_bad_values == "keep":
                self.progress.note(f"kept sample {request.rid!r} with {reason}")
                continue
            detail = {"code": "bad_values", "faults": [fault.as_json() for fault in request.faults]}
            writer.reject(place, reason, detail)
            rejected += 1
        return rejected

    def _seal(self, planned: PlannedShard, writers: dict[int, PlannedShardWriter], sealed: dict[int, Shard]) -> None:
        done = writers[planned.index].seal()
        done.close()  # opened again by whoever reads it; ten thousand shards are not ten thousand open files
        writers.pop(planned.index).discard()
        sealed[planned.index] = done
