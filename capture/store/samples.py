"""The samples of a shard: their place in the run, their ids, where they came from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...models.errors import UsageError


@dataclass(frozen=True, eq=False)
class ShardSamples:
    """The M samples of one shard, in the order of its rows.

    sample_index: (M,) int64, place in the plan (input order).
    id_bytes: (n,) uint8, all ids in UTF-8, end to end; id_offsets: (M+1,) int64, where each begins.
    source_index: (M,) int32 into `sources`; line: (M,) int64, counted from 1.
    """

    sample_index: NDArray[np.int64]
    id_bytes: NDArray[np.uint8]
    id_offsets: NDArray[np.int64]
    source_index: NDArray[np.int32]
    line: NDArray[np.int64]
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        M = len(self.sample_index)
        lengths = (len(self.id_offsets) - 1, len(self.source_index), len(self.line))
        if lengths != (M, M, M):
            raise UsageError(f"{M} samples need {M} ids, source indices and lines, got {lengths}.")

    def __len__(self) -> int:
        return len(self.sample_index)

    def id(self, position: int) -> str:
        """Return the id of the sample at `position`."""
        start, stop = self.id_offsets[position], self.id_offsets[position + 1]
        return str(self.id_bytes[start:stop].tobytes(), "utf-8")

    def source(self, position: int) -> str:
        """Return the name of the source that the sample at `position` came from."""
        return self.sources[int(self.source_index[position])]

    def take(self, positions: NDArray[np.int64]) -> "ShardSamples":
        """Return the samples at `positions`, in that order."""
        id_bytes, id_offsets = gather_ragged(self.id_bytes, self.id_offsets, positions)
        return ShardSamples(
            self.sample_index[positions],
            id_bytes,
            id_offsets,
            self.source_index[positions],
            self.line[positions],
            self.sources,
        )

    @classmethod
    def of(cls, samples: Iterable[tuple[int, str, str, int]]) -> "ShardSamples":
        """Return the table of samples given as (sample_index, id, source, line)."""
        listed = list(samples)
        ids = [encode_id(sample_id) for _, sample_id, _, _ in listed]
        places: dict[str, int] = {}
        source_index = [places.setdefault(source, len(places)) for _, _, source, _ in listed]
        return cls(
            np.array([index for index, _, _, _ in listed], np.int64),
            np.frombuffer(b"".join(ids), np.uint8),
            edges(np.array([len(encoded) for encoded in ids], np.int64)),
            np.array(source_index, np.int32),
            np.array([line for _, _, _, line in listed], np.int64),
            tuple(places),
        )


def encode_id(sample_id: str) -> bytes:
    """UTF-8; UsageError for an id that is no text or holds a lone surrogate."""
    if not isinstance(sample_id, str):
        raise UsageError(f"a sample's id is a string, got {type(sample_id).__name__} {sample_id!r}.")
    try:
        return sample_id.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the id {sample_id!r} holds a lone surrogate and cannot be stored; replace it.") from error


def edges(lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Return (M+1,) offsets, beginning with 0, of (M,) lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_index(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entries start..start+length-1 of each stretch, end to end."""
    offsets = edges(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])


def gather_ragged(
    values: NDArray[np.uint8], offsets: NDArray[np.int64], positions: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the stretches of `values` at `positions`, end to end, and their offsets."""
    starts = offsets[positions]
    lengths = offsets[positions + 1] - starts
    return values[ragged_index(starts, lengths)], edges(lengths)
