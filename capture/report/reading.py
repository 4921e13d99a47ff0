"""The rows that a report reads: whole samples, spread evenly, in chunks of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..store import Shard
from ..store.columns import ROWS

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Chunk:
    """Neighboring rows of one shard.

    columns: (T, ...) of every row column. sample: (T,) int64, which of the samples read a row belongs to.
    first: (T,) bool, whether it is the first row of its sample.
    """

    columns: dict[str, Tensor]
    sample: NDArray[np.int64]
    first: NDArray[np.bool_]


@dataclass(frozen=True)
class Place:
    """The place of a sample that was read."""

    shard: Shard
    position: int

    @property
    def sample_id(self) -> str:
        """Its id."""
        with self.shard as shard:
            return shard.samples.id(self.position)


def chosen(shards: Sequence[Shard], max_rows: int) -> list[Place]:
    """Return every k-th sample in file order, with the smallest k that reads about `max_rows` rows.

    Shards keep their samples by length, so that every k-th one has all lengths in their proportions.
    """
    step = max(1, -(-sum(shard.R for shard in shards) // max_rows))
    edges = np.cumsum([0, *(shard.M for shard in shards)])
    numbers = np.arange(0, edges[-1], step)
    owners = np.searchsorted(edges, numbers, side="right") - 1
    return [
        Place(shards[owner], number)
        for owner, number in zip(owners.tolist(), (numbers - edges[owners]).tolist(), strict=True)
    ]


def rows_in(places: Sequence[Place]) -> int:
    """Return how many rows these samples have."""
    return sum(stop - start for start, stop in (place.shard.row_range(place.position) for place in places))


def chunks(places: Sequence[Place]) -> Iterator[Chunk]:
    """Yield the rows of these samples, in order; each shard is open only while it is read."""
    start = 0
    while start < len(places):
        shard = places[start].shard
        stop = start
        while stop < len(places) and places[stop].shard is shard:
            stop += 1
        with shard:
            yield from _chunks_of(shard, [place.position for place in places[start:stop]], start)
        start = stop


def _chunks_of(shard: Shard, positions: list[int], number: int) -> Iterator[Chunk]:
    names = [column.name for column in shard.columns if column.axis == ROWS]
    row_bytes = sum(column.row_bytes for column in shard.columns if column.axis == ROWS)
    size = max(1, CHUNK_BYTES // row_bytes)
    for first, last in _stretches(positions):
        offsets = shard.row_offsets[positions[first] : positions[last] + 2]
        for begin in range(int(offsets[0]), int(offsets[-1]), size):
            end = min(begin + size, int(offsets[-1]))
            rows = np.arange(begin, end)
            sample = np.searchsorted(offsets, rows, side="right") - 1
            yield Chunk(
                {name: shard.rows(name, begin, end) for name in names},
                sample + number + first,
                rows == offsets[sample],
            )


def _stretches(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of each run of adjacent positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1).tolist()
    yield from zip([0, *(place + 1 for place in breaks)], [*breaks, len(positions) - 1], strict=True)
