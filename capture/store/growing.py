"""A shard whose rows come as they are made, their number unknown until the seal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ...models.errors import RunError, UsageError
from ..rejects import Reject
from .columns import ROWS, SAMPLING_MASK, Column
from .diskio import UnsealedFile
from .layout import ShardLayout, make_record
from .rows import column_bytes
from .samples import ShardSamples, edges, encode_id
from .shard import Shard
from .spool import Spool

_MASK_LENGTHS = "sampling_mask_lengths"


class GrowingShardWriter:
    """Collects samples that grow side by side: `begin` each, `append` its rows as they come, `seal` at the end.

    Rows wait in one spool file per column beside the shard (so memory stays bounded) and are put in sample order at
    the seal. The sealed file is like a planned one. Leaving without `seal` removes every file.

    columns: row columns, and `sampling_mask_ids` (axis "sampling_mask") together with `sampling_mask_lengths`.
    """

    def __init__(self, path: Path, columns: Sequence[Column], metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._record = make_record(columns, metadata)
        self._columns = {column.name: column for column in columns}
        if any(column.axis == SAMPLING_MASK for column in columns) and _MASK_LENGTHS not in self._columns:
            raise UsageError(f"a column of sampling-mask ids needs a column {_MASK_LENGTHS!r} beside it.")
        self._samples: list[tuple[int, str, str, int]] = []
        self._rejects: dict[int, Reject] = {}
        self._mask_totals: list[int] = []
        self._spools: dict[str, Spool] = {}
        self._file = UnsealedFile(path)
        try:
            for column in columns:
                self._spools[column.name] = Spool(path, column)
        except BaseException:
            self._discard()
            raise

    @property
    def samples(self) -> int:
        """Samples begun and not rejected."""
        return len(self._samples) - len(self._rejects)

    @property
    def rows(self) -> int:
        """Rows of the samples not rejected, counted in the column that has received most."""
        counts = [
            spool.total - sum(spool.counts[sample] for sample in self._rejects)
            for spool in self._spools.values()
            if spool.column.axis == ROWS
        ]
        return max(counts, default=0)

    def begin(self, sample_index: int, sample_id: str, source: str = "", line: int = 0) -> int:
        """Add a sample; returns the handle for `append`. The order of these calls is the order in the shard."""
        encode_id(sample_id)
        self._samples.append((sample_index, sample_id, source, line))
        self._mask_totals.append(0)
        for spool in self._spools.values():
            spool.begin()
        return len(self._samples) - 1

    def append(self, sample: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Add rows (n, *shape) at the end of the named columns of a sample; columns may come in separate calls.

        Raises UsageError for an unknown sample or column, a wrong dtype or shape; nothing of the call is kept then.
        """
        self._require_sample(sample)
        checked = [(self._spool(name), self._checked(sample, name, tensor)) for name, tensor in rows.items()]
        for spool, data in checked:
            spool.append(sample, data)
        if _MASK_LENGTHS in rows:
            self._mask_totals[sample] += int(rows[_MASK_LENGTHS].clamp(min=0).sum())

    def reject(self, sample: int, reason: str, detail: Mapping[str, Any] | None = None) -> None:
        """Take a sample out; what was appended for it will not be in the sealed shard."""
        self._require_sample(sample)
        index, sample_id, source, line = self._samples[sample]
        self._rejects[sample] = Reject(source, line, sample_id, reason, dict(detail or {}), index)

    def seal(self) -> Shard:
        """Make the shard readable and return its reader; the writer is done.

        Raises RunError naming a sample without rows, whose columns differ in rows, or whose sampling masks' ids are
        not as many as their lengths say.
        """
        kept = [sample for sample in range(len(self._samples)) if sample not in self._rejects]
        counts = self._row_counts(kept)
        layout = self._planned(kept, counts)
        self._file.reserve(layout.size)
        sums = np.zeros((len(kept), len(layout.columns)), np.uint32)
        for place, column in enumerate(layout.columns):
            sums[:, place] = self._spools[column.name].move(kept, self._file, layout.start(column.name))
        layout.seal(self._file, sums)
        return Shard(self._path)

    def __enter__(self) -> "GrowingShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        for spool in self._spools.values():
            spool.discard()
        self._file.discard()

    def _planned(self, kept: list[int], counts: list[int]) -> ShardLayout:
        samples = ShardSamples.of(self._samples[sample] for sample in kept)
        rejects = tuple(self._rejects[sample] for sample in sorted(self._rejects))
        record = replace(self._record, sources=samples.sources, rejects=rejects)
        masks = any(column.axis == SAMPLING_MASK for column in self._columns.values())
        mask_offsets = edges([self._mask_totals[sample] for sample in kept]) if masks else None
        return ShardLayout.of(tuple(self._columns.values()), samples, edges(counts), record, mask_offsets)

    def _row_counts(self, kept: list[int]) -> list[int]:
        return [self._row_count(sample) for sample in kept]

    def _row_count(self, sample: int) -> int:
        found = {name: spool.counts[sample] for name, spool in self._spools.items()}
        rows = {name: count for name, count in found.items() if self._columns[name].axis == ROWS}
        who = f"{self._path.name} cannot be sealed, sample {self._samples[sample][1]!r}"
        if len(set(rows.values())) != 1 or 0 in rows.values():
            raise RunError(f"{who}: every column needs the same number of rows, at least one; found {rows}.")
        for name in found.keys() - rows.keys():
            if found[name] != self._mask_totals[sample]:
                raise RunError(
                    f"{who}: {_MASK_LENGTHS} add up to {self._mask_totals[sample]}, {name} has {found[name]}."
                )
        return next(iter(rows.values()))

    def _require_sample(self, sample: int) -> None:
        if not 0 <= sample < len(self._samples):
            raise UsageError(f"{self._path.name} has begun samples 0..{len(self._samples) - 1}, got {sample}.")

    def _spool(self, name: str) -> Spool:
        if name not in self._spools:
            raise UsageError(f"{self._path.name} has columns {sorted(self._spools)}, not {name!r}.")
        return self._spools[name]

    def _checked(self, sample: int, name: str, tensor: torch.Tensor) -> memoryview:
        where = f"next rows of sample {self._samples[sample][1]!r}"
        return column_bytes(self._columns[name], tensor, where)
