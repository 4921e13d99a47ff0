"""Planned shards, from their tokens to their seals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ...models.choices import OnBadValues
from ...models.errors import RunError
from ...models.length_limits import NO_LIMITS, LengthLimits
from ..outputs import HostCopy, PendingHostCopy, Rows
from ..progress import Done, Progress
from ..store import Column, OutputFolder, Plan, PlannedShard, PlannedShardWriter, ShardSamples
from .background import Background
from .batches import SampleRows, TokenBatch
from .engine import Engine
from .engines.row_check import RowFault
from .pacing.forwards import Forwards
from .pacing.pace import Pacer
from .planned_images import PlannedImages

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
        """Add faults; one kind of fault at one tap is one fault, in however many chunks its rows came."""
        for fault in faults:
            same = next(
                (i for i, one in enumerate(self.faults) if (one.tap, one.what) == (fault.tap, fault.what)), None
            )
            if same is None:
                self.faults.append(fault)
            else:
                self.faults[same] = replace(self.faults[same], count=self.faults[same].count + fault.count)


@dataclass(frozen=True)
class SampleBatch:
    """The requests of one forward: neighbors in one shard, from its row `row_start` on."""

    reqs: Sequence[SampleRequest]
    writer: PlannedShardWriter
    row_start: int

    def append_all(self, rows: Mapping[str, Rows]) -> None:
        self.writer.write(self.row_start, rows)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PlannedRows:
    """The rows of one sample in a planned shard, for an engine that gives them apart from those of its neighbors."""

    writer: PlannedShardWriter
    row_start: int

    def append(self, first_position: int, rows: Mapping[str, Rows]) -> None:
        self.writer.write(self.row_start + first_position, rows)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShardTokens:
    """The tensors of one shard beside its hidden states.

    rows: its samples and their tokens. loss_mask: (R,) uint8. is_text: (R,) uint8 in a run with images, else None.
    """

    planned: PlannedShard
    samples: ShardSamples
    rows: SampleRows
    loss_mask: Tensor
    is_text: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Return the columns that are known before any forward."""
        known = {"input_ids": self.rows.input_ids, "loss_mask": self.loss_mask}
        return known if self.is_text is None else known | {"is_text": self.is_text}


@dataclass
class OpenShard:
    """A shard that is being filled.

    begun: the request of a sample of which more chunks are to come.
    """

    writer: PlannedShardWriter
    begun: SampleRequest | None = None


@dataclass
class ShardRun:
    """Captures shards: the forward in this thread; waiting for the copy, rows to disk and seals in one behind it.

    `images` is None where no sample has any. `check_stop` is called between batches and may raise.
    `limits`, `chunk`: lengths that keep samples apart, and those that run in chunks; see `BatchRule`.
    """

    plan: Plan
    folder: OutputFolder
    engine: Engine
    columns: Sequence[Column]
    metadata: Mapping[str, Any]
    pacer: Pacer
    on_bad_values: OnBadValues
    progress: Progress
    check_stop: Callable[[], None]
    images: PlannedImages | None = None
    limits: LengthLimits = NO_LIMITS
    chunk: int | None = None

    def capture(self, shards: Iterable[PlannedShard]) -> None:
        """Fill and seal `shards` one after the other.

        Raises what the forward, the disk or `check_stop` raises, in whichever thread. Whatever could be sealed before that
        is, and the files of the other shards are gone.
        """
        filling: dict[int, OpenShard] = {}
        host_copy = HostCopy(self.engine.device)
        forwards = Forwards(self.pacer, self.engine.device, self.limits, self.progress.note, self.chunk)
        try:
            with Background(WAITING_BATCHES) as background:
                for shard, ran in forwards.of_shards(map(self._tokens_of, shards), self.check_stop):
                    for tokens, output in ran:
                        background.submit(partial(self._store, shard, filling, tokens, host_copy.start(output)))
                    background.submit(partial(self._seal, shard.planned, filling))
        finally:
            for one in filling.values():
                one.writer.discard()

    def _tokens_of(self, planned: PlannedShard) -> ShardTokens:
        samples = self.plan.samples_of(planned)
        ids = [samples.id(place) for place in range(planned.M)]
        input_ids, loss_mask = self.plan.tokens_of(planned)
        if self.images is None:
            return ShardTokens(planned, samples, SampleRows(ids, planned.row_offsets, input_ids), loss_mask)
        rows = SampleRows(ids, planned.row_offsets, input_ids, self.images.of_shard(planned, input_ids))
        return ShardTokens(planned, samples, rows, loss_mask, self.plan.is_text_of(planned))

    def _store(
        self, shard: ShardTokens, filling: dict[int, OpenShard], tokens: TokenBatch, pending: PendingHostCopy
    ) -> None:
        filled = filling.get(shard.planned.index) or self._open(shard, filling)
        writer = filled.writer
        offsets = shard.planned.row_offsets[tokens.samples.start : tokens.samples.stop].tolist()
        requests = (
            [filled.begun]
            if filled.begun
            else [
                SampleRequest(shard.rows.ids[place], PlannedRows(writer, offset))
                for place, offset in zip(tokens.samples, offsets, strict=True)
            ]
        )
        try:
            pending.wait().consume(SampleBatch(requests, writer, offsets[0]), [None] * len(requests))
        except ExceptionGroup as failed:
            # One child of the composite failed, as a full disk does it: that error itself tells more than a group of one.
            if len(failed.exceptions) == 1:
                raise failed.exceptions[0] from None
            raise
        # A sample is judged once all of its rows are there.
        filled.begun = None if tokens.ends_samples else requests[0]
        rejected = self._judge(writer, tokens, requests) if tokens.ends_samples else 0
        B, T = tokens.positions.B if tokens.ends_samples else 0, tokens.positions.T
        written = T * sum(column.row_bytes for column in self.columns)
        self.progress.advanced(Done(B, T, written=written, rejected=rejected))

    def _open(self, shard: ShardTokens, filling: dict[int, OpenShard]) -> OpenShard:
        path = self.folder.shard_path(shard.planned.index)
        writer = PlannedShardWriter(path, shard.planned, shard.samples, self.columns, self.metadata)
        filling[shard.planned.index] = OpenShard(writer)
        writer.write(0, shard.columns())
        return filling[shard.planned.index]

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

    def _seal(self, planned: PlannedShard, filling: dict[int, OpenShard]) -> None:
        filling[planned.index].writer.seal().close()  # ten thousand shards are not ten thousand open files
        filling.pop(planned.index).writer.discard()
