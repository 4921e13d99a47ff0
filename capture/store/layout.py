"""The place of every tensor of a shard, known before the first row."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.errors import UsageError
from .columns import ROWS, SAMPLING_MASK, Column
from .diskio import UnsealedFile, array_bytes
from .header import TensorEntry, build_header, place_tensors
from .record import SealRecord, header_checksum
from .samples import ShardSamples

AnyArray = NDArray[np.generic]
MASK_OFFSETS = "sampling_mask_offsets"
CHECKSUMS = "checksums"


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The complete shape of one shard file.

    columns: sorted by name, which is the order of the `checksums` tensor's second dimension.
    row_offsets: (M+1,) int64; sample j owns rows row_offsets[j] .. row_offsets[j+1].
    mask_offsets: (M+1,) int64 alike for the flat sampling masks; None without such a column.
    entries: every tensor by name; record: the metadata; header_length: bytes of the header's JSON, padding included.
    """

    columns: tuple[Column, ...]
    samples: ShardSamples
    row_offsets: NDArray[np.int64]
    mask_offsets: NDArray[np.int64] | None
    entries: Mapping[str, TensorEntry]
    record: SealRecord
    header_length: int

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        samples: ShardSamples,
        row_offsets: NDArray[np.int64],
        record: SealRecord,
        mask_offsets: NDArray[np.int64] | None = None,
    ) -> "ShardLayout":
        """Place the columns and our own tensors for these samples."""
        counts = {ROWS: int(row_offsets[-1])}
        if mask_offsets is not None:
            counts[SAMPLING_MASK] = int(mask_offsets[-1])
        own = own_tensors(len(samples), len(samples.id_bytes), len(columns), mask_offsets is not None)
        given = {column.name: (column.dtype, (counts[column.axis], *column.shape)) for column in columns}
        entries = place_tensors((name, dtype, shape) for name, (dtype, shape) in {**own, **given}.items())
        header = build_header(entries, record.text(reserved=tuple(own)))
        ordered = tuple(sorted(columns, key=lambda column: column.name))
        by_name = {entry.name: entry for entry in entries}
        return cls(ordered, samples, row_offsets, mask_offsets, by_name, record, len(header))

    @property
    def data_start(self) -> int:
        """File offset of the first tensor's first byte, a multiple of 64."""
        return 8 + self.header_length

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data_start + max(entry.stop for entry in self.entries.values())

    def start(self, name: str) -> int:
        """File offset of a tensor's first byte."""
        return self.data_start + self.entries[name].start

    def offsets(self, column: Column) -> NDArray[np.int64]:
        """Return (M+1,) int64: where each sample's entries of `column` begin."""
        if column.axis == ROWS:
            return self.row_offsets
        if self.mask_offsets is None:
            raise UsageError(f"column {column.name!r} counts sampling masks and this shard has none.")
        return self.mask_offsets

    def seal(self, file: UnsealedFile, checksums: NDArray[np.uint32]) -> None:
        """Write our own tensors and the header into `file`, whose columns are complete, and seal it.

        checksums: (M, len(columns)) uint32, CRC-32 of each sample's bytes of each column.
        """
        numbers: dict[str, int] = {}
        for name, array in self._own_arrays(checksums).items():
            data = array_bytes(array)
            file.write(data, self.start(name))
            numbers[name] = zlib.crc32(data)
        file.seal(self._sealed_header(numbers))

    def _sealed_header(self, numbers: Mapping[str, int]) -> bytes:
        entries = self.entries.values()
        draft = build_header(entries, self.record.with_checksums(numbers).text(), length=self.header_length)
        final = self.record.with_checksums(numbers, header_checksum(draft))
        return build_header(entries, final.text(), length=self.header_length)

    def _own_arrays(self, checksums: NDArray[np.uint32]) -> dict[str, AnyArray]:
        arrays: dict[str, AnyArray] = {
            "row_offsets": self.row_offsets,
            "sample_index": self.samples.sample_index,
            "sample_ids": self.samples.id_bytes,
            "sample_id_offsets": self.samples.id_offsets,
            "source_index": self.samples.source_index,
            "source_line": self.samples.line,
            CHECKSUMS: checksums,
        }
        if self.mask_offsets is not None:
            arrays[MASK_OFFSETS] = self.mask_offsets
        return arrays


def own_tensors(M: int, id_bytes: int, columns: int, masks: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of the tensors that every shard has beside its columns."""
    own: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "row_offsets": (torch.int64, (M + 1,)),
        "sample_index": (torch.int64, (M,)),
        "sample_ids": (torch.uint8, (id_bytes,)),
        "sample_id_offsets": (torch.int64, (M + 1,)),
        "source_index": (torch.int32, (M,)),
        "source_line": (torch.int64, (M,)),
        CHECKSUMS: (torch.uint32, (M, columns)),
    }
    if masks:
        own[MASK_OFFSETS] = (torch.int64, (M + 1,))
    return own


def make_record(columns: Sequence[Column], metadata: Mapping[str, Any], sources: tuple[str, ...] = ()) -> SealRecord:
    """Return the record of a shard before its seal; UsageError where two columns share a name or take one of ours."""
    names = [column.name for column in columns]
    taken = set(own_tensors(0, 0, 0, masks=True))
    repeated = sorted({name for name in names if names.count(name) > 1 or name in taken})
    if repeated:
        raise UsageError(f"column names must be unique and none of {sorted(taken)}; found {repeated}.")
    record = SealRecord(dict(metadata), {column.name: column.axis for column in columns}, sources)
    record.text()
    return record
