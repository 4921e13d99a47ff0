"""The rows of a finished capture, read column by column in input order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.errors import RunError, UsageError
from ..store import Manifest, OutputFolder
from ..store.description import AUX, POST_NORM, PRE_NORM
from ..store.sample_places import SamplePlaces
from .errors import FormatError


class Who(NamedTuple):
    """Identity of a sample: data, never part of a path."""

    sample_id: str
    source: str
    line: int


class CapturedFolder:
    """The captured samples of an output folder.

    Only the columns that are asked for are read, so that a pass over the loss masks does not read hidden states; what is read is
    held against its checksum.
    Keeps 16 bytes per sample in memory.

    Attributes:
        about: what the first shard says of model and taps.

    Raises:
        RunError: the capture is damaged or not complete.
        UsageError: the folder is no capture, there is no sample, or the shards were made by something that names no taps.
    """

    def __init__(self, path: Path) -> None:
        folder = OutputFolder(path)
        folder.require_capture()
        manifest = Manifest.read(folder.manifest_path)
        if not manifest.complete:
            raise RunError(f"{path}: the capture is not complete. {manifest.way_on} Then export it.")
        contradictions = manifest.contradictions()
        if contradictions:
            raise RunError(f"{folder.manifest_path}: {'; '.join(contradictions)}; see `hiddentap verify`.")
        self.path = path
        self.fingerprint = hashlib.sha256(folder.manifest_path.read_bytes()).hexdigest()
        self._places = SamplePlaces(manifest.open_shards(path))
        if not len(self._places):
            raise UsageError(f"{path} holds no sample, so there is nothing to export.")
        first = self._places.shards[0]
        self.about = first.description
        self.taps = self.about.require_taps(path)
        self.columns = {column.name: column for column in first.columns}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return (N,) int64: rows of each sample."""
        return self._places.lengths

    def __len__(self) -> int:
        return len(self._places)

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored rows of hidden states."""
        return self.columns[self._hidden_column()].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return how the model computed them."""
        return self.about.torch_compute_dtype or self.dtype

    def input_ids(self, i: int) -> Tensor:
        """(S,) int32"""
        return self._rows(i, "input_ids")

    def loss_mask(self, i: int) -> Tensor:
        """(S,) uint8"""
        return self._rows(i, "loss_mask")

    def aux_hidden_states(self, i: int, rows: int) -> Tensor:
        """Return (rows, K, H) stored dtype, the first rows of sample i."""
        return self._rows(i, AUX, rows)

    def final(self, i: int, column: str, rows: int) -> Tensor:
        """Return (rows, H) stored dtype, the first rows of `pre_norm` or `post_norm`."""
        return self._rows(i, column, rows)

    def who(self, i: int) -> Who:
        """Return the sample's id, source and line."""
        shard, position = self._places.locate(i)
        samples = shard.samples
        return Who(samples.id(position), samples.source(position), int(samples.line[position]))

    def _hidden_column(self) -> str:
        for name in (AUX, PRE_NORM, POST_NORM):
            if name in self.columns:
                return name
        raise FormatError(f"{self.path} holds no hidden states, only {', '.join(sorted(self.columns))}.")

    def _rows(self, i: int, column: str, rows: int | None = None) -> Tensor:
        shard, position = self._places.locate(i)
        return shard.checked_rows(position, column)[:rows]
