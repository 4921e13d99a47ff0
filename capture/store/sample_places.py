"""The place of every captured sample of a folder."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shard import Shard

OPEN_FILES = 128


def most_open_files() -> int:
    """Return the maximum number of shards held open at once: 128, or a quarter of the file limit (`ulimit -n`) if less."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if limit == resource.RLIM_INFINITY else max(1, min(OPEN_FILES, limit // 4))


class SamplePlaces:
    """The M samples of many shards, in input order; keeps 16 bytes per sample in memory and at most 128 files open.

    shards: in any order; they open their files by themselves.
    shard_of, position: (M,) int32, the shard of each sample and its place there. lengths: (M,) int64, its rows.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        counts = [shard.M for shard in shards]
        order = np.argsort(_joined([shard.sample_index for shard in shards], np.int64), kind="stable")
        self.shards = shards
        self.shard_of: NDArray[np.int32] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        self.position: NDArray[np.int32] = _joined([np.arange(M, dtype=np.int32) for M in counts], np.int32)[order]
        self.lengths: NDArray[np.int64] = _joined([np.diff(shard.row_offsets) for shard in shards], np.int64)[order]
        self._opened: OrderedDict[int, None] = OrderedDict()
        self._most_open = most_open_files()

    def __len__(self) -> int:
        return len(self.lengths)

    def locate(self, index: int) -> tuple[Shard, int]:
        """Return the shard of sample `index` (negative from the end) and its place there; raises IndexError outside."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"the capture has {len(self)} captured samples, got {index}")
        number = int(self.shard_of[place])
        self._opened[number] = None
        self._opened.move_to_end(number)
        if len(self._opened) > self._most_open:
            self.shards[self._opened.popitem(last=False)[0]].close()
        return self.shards[number], int(self.position[place])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
