"""The rows of a finished capture, read column by column in input order."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.errors import RunError, UsageError
from ..store import Manifest, OutputFolder, Shard
from ..store.shard import open_and_close
from .errors import FormatError
from .taps import TapInfo

OPEN_FILES = 64
AUX = "aux_hidden_states"


class Who(NamedTuple):
    """Which sample it is: data, never part of a path."""

    sample_id: str
    source: str
    line: int


class Captured:
    """The captured samples of an output folder.

    Only the columns that are asked for are read, so that a pass over the loss masks does not read hidden states.
    Keeps 24 bytes per sample in memory.

    Attributes:
        lengths: (N,) int64, rows of each sample.
        metadata: what the shards say of model and taps.

    Raises:
        RunError: the folder is no capture, or one that is not complete.
        UsageError: there is no sample, or the shards were made by something that names no taps.
    """

    def __init__(self, path: Path) -> None:
        folder = OutputFolder(path)
        manifest = Manifest.read(folder.manifest_path)
        if not manifest.complete:
            raise RunError(f"{path}: the capture is not complete; finish it by running it again, then export it.")
        self.path = path
        self.fingerprint = hashlib.sha256(folder.manifest_path.read_bytes()).hexdigest()
        self._shards = [open_and_close(path / entry.file) for entry in manifest.shards]
        self._opened: OrderedDict[int, None] = OrderedDict()
        if not sum(shard.M for shard in self._shards):
            raise UsageError(f"{path} holds no sample, so there is nothing to export.")
        self.metadata: dict[str, Any] = self._shards[0].metadata
        if "taps" not in self.metadata:
            raise UsageError(f"{path}: its shards do not say which layers they hold; capture or import them again.")
        self.taps = TapInfo.of(self.metadata)
        self.columns = {column.name: column for column in self._shards[0].columns}
        self._place_samples()

    def _place_samples(self) -> None:
        counts = [shard.M for shard in self._shards]
        order = np.argsort(np.concatenate([shard.sample_index for shard in self._shards]), kind="stable")
        self._shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        self._position = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])[order]
        self.lengths: NDArray[np.int64] = np.concatenate([np.diff(s.row_offsets) for s in self._shards])[order]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored rows of hidden states."""
        return self.columns[self._hidden_column()].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """How the model computed them."""
        found = getattr(torch, str(self.metadata.get("compute_dtype")), None)
        return found if isinstance(found, torch.dtype) else self.dtype

    def input_ids(self, i: int) -> Tensor:
        """(S,) int32"""
        return self._rows(i, "input_ids")

    def loss_mask(self, i: int) -> Tensor:
        """(S,) uint8"""
        return self._rows(i, "loss_mask")

    def aux_hidden_states(self, i: int, rows: int) -> Tensor:
        """(rows, K, H) stored dtype, the first rows of sample i."""
        return self._rows(i, AUX, rows)

    def final(self, i: int, column: str, rows: int) -> Tensor:
        """(rows, H) stored dtype, the first rows of `pre_norm` or `post_norm`."""
        return self._rows(i, column, rows)

    def who(self, i: int) -> Who:
        """The sample's id, source and line."""
        shard, position = self._locate(i)
        samples = shard.samples
        return Who(samples.id(position), samples.source(position), int(samples.line[position]))

    def _hidden_column(self) -> str:
        for name in (AUX, "pre_norm", "post_norm"):
            if name in self.columns:
                return name
        raise FormatError(f"{self.path} holds no hidden states, only {', '.join(sorted(self.columns))}.")

    def _rows(self, i: int, column: str, rows: int | None = None) -> Tensor:
        shard, position = self._locate(i)
        start, stop = shard.row_range(position)
        return shard.rows(column, start, stop if rows is None else min(stop, start + rows))

    def _locate(self, i: int) -> tuple[Shard, int]:
        number = int(self._shard_of[i])
        self._opened[number] = None
        self._opened.move_to_end(number)
        if len(self._opened) > OPEN_FILES:
            self._shards[self._opened.popitem(last=False)[0]].close()
        return self._shards[number], int(self._position[i])
