"""One planned shard, from its tokens to its seal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...models.errors import RunError
from ..outputs import HostCopy, Rows
from ..store import Column, OutputFolder, Plan, PlannedShard, PlannedShardWriter, Shard
from .batches import TokenBatch, batch_end, single_samples, token_batch
from .budget import TokenBudget
from .engine import Engine
from .progress import Progress
from .row_faults import RowFault
from .settings import OnBadValues


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


@dataclass
class ShardRun:
    """Captures the shards of one plan, one after the other.

    Raises, from `capture`, what the forward or the disk raises; the shard is then not sealed, and its file is gone.
    """

    plan: Plan
    folder: OutputFolder
    engine: Engine
    columns: Sequence[Column]
    metadata: Mapping[str, Any]
    budget: TokenBudget | None  # None: one sample a forward
    on_bad_values: OnBadValues
    progress: Progress

    def capture(self, planned: PlannedShard) -> Shard:
        """Fill and seal one shard."""
        samples = self.plan.samples_of(planned)
        input_ids, loss_mask = self.plan.tokens_of(planned)
        host_copy = HostCopy(self.engine.device)
        path = self.folder.shard_path(planned.index)
        with PlannedShardWriter(path, planned, samples, self.columns, self.metadata) as writer:
            writer.write(0, {"input_ids": input_ids, "loss_mask": loss_mask})
            for batch in self._batches(planned, input_ids):
                offsets = planned.row_offsets[batch.samples.start : batch.samples.stop].tolist()
                requests = [
                    SampleRequest(samples.id(place), PlannedRows(writer, offset))
                    for place, offset in zip(batch.samples, offsets, strict=True)
                ]
                host = host_copy.start(self.engine.forward(batch)).wait()
                host.consume(SampleBatch(requests), [None] * len(requests))
                self._judge(writer, batch, requests)
                self.progress.captured(batch.positions.B, batch.positions.T)
            return writer.seal()

    def _batches(self, planned: PlannedShard, input_ids: Tensor) -> Iterator[TokenBatch]:
        if self.budget is None:
            for first, stop in single_samples(planned.M):
                yield token_batch(first, stop, planned.row_offsets, input_ids)
            return
        first = 0
        while first < planned.M:
            size = self.budget.next()
            stop = batch_end(planned.lengths, first, size)
            start = time.perf_counter()
            batch = token_batch(first, stop, planned.row_offsets, input_ids)
            yield batch
            # The caller has used the batch when it asks for the next one.
            positions = batch.positions
            self.budget.observe(size, positions.T, positions.B * positions.S, time.perf_counter() - start)
            first = stop

    def _judge(self, writer: PlannedShardWriter, batch: TokenBatch, requests: Sequence[SampleRequest]) -> None:
        for place, request in zip(batch.samples, requests, strict=True):
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
