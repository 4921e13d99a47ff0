"""A planned shard on its way to disk: reserved, filled by row offset, sealed once every row is there."""

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.errors import RunError, UsageError
from ..rejects import Reject
from .assignment import PlannedShard
from .columns import ROWS, Column
from .diskio import COPY_BYTES, UnsealedFile
from .layout import ShardLayout, make_record
from .rows import column_bytes
from .samples import ShardSamples, edges
from .shard import Shard


class PlannedShardWriter:
    """Writes one shard whose rows are known: `with PlannedShardWriter(...) as writer: ...; writer.seal()`.

    Leaving without `seal` removes the temporary file. Rows may come in any order and any grouping, each once; nothing
    is kept in memory but one byte per row and column and four per sample and column.

    path: the sealed file's name; its folder exists.
    planned, samples: the shard of the plan, and who its samples are, in the same order.
    columns: all with axis "rows". metadata: JSON values, stored in the header.
    Raises UsageError for columns or metadata that cannot be stored, DiskFullError if the shard does not fit.
    """

    def __init__(
        self,
        path: Path,
        planned: PlannedShard,
        samples: ShardSamples,
        columns: Sequence[Column],
        metadata: Mapping[str, Any],
    ) -> None:
        if any(column.axis != ROWS for column in columns):
            raise UsageError("a planned shard holds columns with axis 'rows' only; use GrowingShardWriter for others.")
        if not np.array_equal(planned.sample_index, samples.sample_index):
            raise UsageError(f"{planned.name}: the samples given are not those of the plan.")
        record = make_record(columns, metadata, samples.sources)
        self._layout = ShardLayout.of(columns, samples, planned.row_offsets, record)
        columns = self._layout.columns
        self._place = {column.name: place for place, column in enumerate(columns)}
        self._written = np.zeros((len(columns), planned.R), bool)
        self._checksums = np.zeros((planned.M, len(columns)), np.uint32)
        self._checked = np.zeros((planned.M, len(columns)), bool)
        self._rejects: dict[int, Reject] = {}
        self._summing = ThreadPoolExecutor(1, "hiddentap-checksums")
        self._file = UnsealedFile(path)
        try:
            self._file.reserve(self._layout.size)
        except BaseException:
            self.discard()
            raise

    def write(self, row_start: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Write rows row_start.. of the named columns; a range may span any number of samples.

        rows: per column a CPU tensor (n, *shape) of the column's dtype; its memory is not needed after the call.
        Raises UsageError naming column and rows: unknown column, wrong dtype or shape, outside the shard, written
        twice; nothing of the call is written then. Raises DiskFullError where the file cannot grow.
        """
        checked = [self._checked_rows(name, tensor, row_start) for name, tensor in rows.items()]
        _ = self._file.fd  # raises where the writer is done
        # Checksums are made beside the writes: both let other threads run, and neither needs the other.
        sums = [
            self._summing.submit(self._sum_whole_samples, place, row_start, stop, data) for place, stop, data in checked
        ]
        try:
            for place, stop, data in checked:
                column = self._layout.columns[place]
                self._file.write(data, self._layout.start(column.name) + row_start * column.row_bytes)
                self._written[place, row_start:stop] = True
        finally:
            wait(sums)  # they read memory that is the caller's
        for summed in sums:
            summed.result()

    def reject(self, position: int, reason: str, detail: Mapping[str, Any] | None = None) -> None:
        """Take the sample at `position` out: its rows, written or not, will not be in the sealed shard."""
        samples = self._layout.samples
        if not 0 <= position < len(samples):
            raise UsageError(f"{self._file.target.name} has samples 0..{len(samples) - 1}, got position {position}.")
        self._rejects[position] = Reject(
            samples.source(position),
            int(samples.line[position]),
            samples.id(position),
            reason,
            dict(detail or {}),
            int(samples.sample_index[position]),
        )

    def seal(self) -> Shard:
        """Make the shard readable and return its reader; the writer is done.

        Raises RunError naming the samples and columns whose rows are missing; nothing is sealed then.
        """
        kept = np.setdiff1d(np.arange(len(self._layout.samples)), np.array(sorted(self._rejects), np.int64))
        self._require_rows(kept)
        self._sum_remaining_samples(kept)
        if self._rejects:
            self._seal_without_rejects(kept)
        else:
            self._layout.seal(self._file, self._checksums)
        return Shard(self._file.target)

    def __enter__(self) -> "PlannedShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the temporary file; harmless after `seal`."""
        self._summing.shutdown()
        self._file.discard()

    def _checked_rows(self, name: str, tensor: torch.Tensor, row_start: int) -> tuple[int, int, memoryview]:
        place = self._place.get(name)
        if place is None:
            raise UsageError(f"{self._file.target.name} has columns {sorted(self._place)}, not {name!r}.")
        stop = row_start + (tensor.shape[0] if tensor.dim() else 0)
        where = f"rows {row_start}:{stop} of {self._file.target.name}"
        data = column_bytes(self._layout.columns[place], tensor, where)
        R = self._written.shape[1]
        if row_start < 0 or stop > R:
            raise UsageError(f"{name}, {where}: outside the shard, which has rows 0:{R}.")
        taken = self._written[place, row_start:stop]
        if taken.any():
            raise UsageError(f"{name}, {where}: row {row_start + int(taken.argmax())} is written already.")
        return place, stop, data

    def _sum_whole_samples(self, place: int, row_start: int, stop: int, data: memoryview) -> None:
        offsets = self._layout.row_offsets
        first = int(np.searchsorted(offsets, row_start))
        last = int(np.searchsorted(offsets, stop, side="right")) - 1
        if last <= first:
            return
        row_bytes = self._layout.columns[place].row_bytes
        ends = ((offsets[first : last + 1] - row_start) * row_bytes).tolist()
        sums = [zlib.crc32(data[start:end]) for start, end in pairwise(ends)]
        self._checksums[first:last, place] = sums
        self._checked[first:last, place] = True

    def _require_rows(self, kept: NDArray[np.int64]) -> None:
        layout = self._layout
        missing: list[str] = []
        for place, column in enumerate(layout.columns):
            absent = np.add.reduceat(~self._written[place], layout.row_offsets[:-1], dtype=np.int64)
            for position in kept[absent[kept] > 0]:
                missing.append(f"{column.name} of sample {layout.samples.id(position)!r}: {absent[position]} rows")
        if missing:
            shown = "; ".join(missing[:5]) + (f"; and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise RunError(f"{self._file.target.name} cannot be sealed, rows were never written: {shown}.")

    def _sum_remaining_samples(self, kept: NDArray[np.int64]) -> None:
        """Samples whose rows came in pieces are read back."""
        for place, column in enumerate(self._layout.columns):
            start, row_bytes = self._layout.start(column.name), column.row_bytes
            for position in kept[~self._checked[kept, place]]:
                begin, end = self._layout.row_offsets[position : position + 2].tolist()
                self._checksums[position, place] = self._crc32(start + begin * row_bytes, start + end * row_bytes)

    def _crc32(self, start: int, stop: int) -> int:
        buffer, value = memoryview(bytearray(min(stop - start, COPY_BYTES))), 0
        while start < stop:
            part = buffer[: min(COPY_BYTES, stop - start)]
            self._file.read(part, start)
            value, start = zlib.crc32(part, value), start + len(part)
        return value

    def _seal_without_rejects(self, kept: NDArray[np.int64]) -> None:
        old = self._layout
        lengths = np.diff(old.row_offsets)[kept]
        record = replace(old.record, rejects=tuple(self._rejects[position] for position in sorted(self._rejects)))
        new = ShardLayout.of(old.columns, old.samples.take(kept), edges(lengths), record)
        rewritten = UnsealedFile(self._file.target, ".rewrite")
        try:
            rewritten.reserve(new.size)
            for column in old.columns:
                self._copy_kept(column, kept, new, rewritten)
            new.seal(rewritten, self._checksums[kept])
        finally:
            rewritten.discard()
        self._file.discard()

    def _copy_kept(self, column: Column, kept: NDArray[np.int64], new: ShardLayout, rewritten: UnsealedFile) -> None:
        old, size = self._layout, column.row_bytes
        position = new.start(column.name)
        for first, last in _stretches(kept):
            begin, end = int(old.row_offsets[first]), int(old.row_offsets[last + 1])
            source = old.start(column.name) + begin * size
            rewritten.copy_from(self._file.fd, source, position, (end - begin) * size, self._file.path)
            position += (end - begin) * size


def _stretches(positions: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Sorted positions -> (first, last) of each run of neighbors: one copy per run, not per sample."""
    if len(positions) == 0:
        return []
    breaks = np.flatnonzero(np.diff(positions) > 1)
    firsts = positions[np.concatenate(([0], breaks + 1))]
    lasts = positions[np.concatenate((breaks, [len(positions) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
