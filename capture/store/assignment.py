"""The assignment of samples to shards and rows: a function of the token lengths alone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from ...models.errors import UsageError
from .samples import edges, ragged_index

if TYPE_CHECKING:
    from .shard import Shard

_SHARD_NAME = re.compile(r"shard-(\d{6,})\.safetensors")


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:06d}.safetensors"


def shard_index(name: str) -> int | None:
    """Return the index in the file name of a sealed shard; None for any other name."""
    found = _SHARD_NAME.fullmatch(name)
    return int(found.group(1)) if found else None


@dataclass(frozen=True, eq=False)
class PlannedShard:
    """The fixed content of one shard: its samples ordered by (length, input order), so neighbors are of near-equal
    length and any batch of neighbors is one range of rows.

    sample_index: (M,) int64, place in the plan; lengths: (M,) int64, rows of each, at least 1.
    row_offsets: (M+1,) int64; sample j owns rows row_offsets[j] .. row_offsets[j+1].
    """

    index: int
    sample_index: NDArray[np.int64]
    lengths: NDArray[np.int64]
    row_offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.lengths) == 0 or int(self.lengths.min()) < 1:
            raise UsageError(f"{self.name}: a planned shard has samples and each has at least one row.")

    @property
    def M(self) -> int:
        """Samples."""
        return len(self.sample_index)

    @property
    def R(self) -> int:
        """Rows."""
        return int(self.row_offsets[-1])

    @property
    def name(self) -> str:
        """Return the file's name."""
        return shard_name(self.index)

    def rows_of(self, places: Sequence[int]) -> NDArray[np.int64]:
        """Return (r,) int64: the rows of the samples at `places`, in that order."""
        kept = np.asarray(places, np.int64)
        return ragged_index(self.row_offsets[kept], self.lengths[kept])

    def is_held_by(self, shard: "Shard") -> bool:
        """Return whether the sealed shard's samples, with those it rejected, are these, in this order and of these lengths."""
        rejected = np.array([reject.sample_index for reject in shard.rejects], np.int64)
        gone = np.isin(self.sample_index, rejected)
        return (
            int(gone.sum()) == len(rejected)
            and np.array_equal(self.sample_index[~gone], shard.sample_index)
            and np.array_equal(self.lengths[~gone], np.diff(shard.row_offsets))
        )


class Assignment(Sequence[PlannedShard]):
    """All planned shards of a run, each made when asked for: samples in input order, cut into consecutive chunks of at
    most `shard_rows` rows; a longer sample is a shard of its own.

    Keeps 8 bytes per sample (where its rows begin) and 8 per shard beside `lengths` (M,) itself.
    """

    def __init__(self, lengths: NDArray[np.int32], shard_rows: int) -> None:
        if shard_rows < 1:
            raise UsageError(f"shard_rows must be at least 1, got {shard_rows}.")
        self._lengths = lengths
        self.row_offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self.row_offsets[1:], dtype=np.int64)
        self._bounds = _chunk_bounds(self.row_offsets, shard_rows)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> PlannedShard: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlannedShard]: ...

    def __getitem__(self, index: int | slice) -> PlannedShard | Sequence[PlannedShard]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"the plan has {len(self)} shards, got {index}")
        first, last = self._bounds[place], self._bounds[place + 1]
        lengths = self._lengths[first:last].astype(np.int64)
        order = np.argsort(lengths, kind="stable")
        ordered = lengths[order]
        return PlannedShard(place, first + order, ordered, edges(ordered))


def plan_shards(lengths: NDArray[np.int32] | Sequence[int], shard_rows: int) -> Assignment:
    """Return the shards of samples with these token lengths, in input order."""
    return Assignment(np.asarray(lengths, np.int32), shard_rows)


def _chunk_bounds(row_offsets: NDArray[np.int64], shard_rows: int) -> NDArray[np.int64]:
    M = len(row_offsets) - 1
    bounds = [0]
    while bounds[-1] < M:
        first = bounds[-1]
        fitting = int(np.searchsorted(row_offsets, row_offsets[first] + shard_rows, side="right")) - 1
        bounds.append(max(fitting, first + 1))
    return np.array(bounds, np.int64)
