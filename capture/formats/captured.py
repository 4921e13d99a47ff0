"""The rows of a finished capture, read column by column in input order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.errors import RunError, UsageError
from ..store import Manifest, OutputFolder
from ..store.sample_places import SamplePlaces
from ..store.shard import open_and_close
from .errors import FormatError
from .taps import TapInfo

AUX = "aux_hidden_states"


class Who(NamedTuple):
    """Which sample it is: data, never part of a path."""

    sample_id: str
    source: str
    line: int


class Captured:
    """The captured samples of an output folder.

    Only the columns that are asked for are read, so that a pass over the loss masks does not read hidden states.
    Keeps 16 bytes per sample in memory.

    Attributes:
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
        self._places = SamplePlaces([open_and_close(path / entry.file) for entry in manifest.shards])
        if not len(self._places):
            raise UsageError(f"{path} holds no sample, so there is nothing to export.")
        first = self._places.shards[0]
        self.metadata: dict[str, Any] = first.metadata
        if "taps" not in self.metadata:
            raise UsageError(f"{path}: its shards do not say which layers they hold; capture or import them again.")
        self.taps = TapInfo.of(self.metadata)
        self.columns = {column.name: column for column in first.columns}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) int64: rows of each sample."""
        return self._places.lengths

    def __len__(self) -> int:
        return len(self._places)

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
        shard, position = self._places.locate(i)
        samples = shard.samples
        return Who(samples.id(position), samples.source(position), int(samples.line[position]))

    def _hidden_column(self) -> str:
        for name in (AUX, "pre_norm", "post_norm"):
            if name in self.columns:
                return name
        raise FormatError(f"{self.path} holds no hidden states, only {', '.join(sorted(self.columns))}.")

    def _rows(self, i: int, column: str, rows: int | None = None) -> Tensor:
        shard, position = self._places.locate(i)
        start, stop = shard.row_range(position)
        return shard.rows(column, start, stop if rows is None else min(stop, start + rows))
