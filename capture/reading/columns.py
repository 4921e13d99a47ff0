"""One column of a whole capture."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.errors import UsageError
from ..store import CapturedDataset, Shard


def whole_column(dataset: CapturedDataset, name: str) -> Tensor:
    """Return the rows of one column, shard after shard, without reading any other: (R, ...) over all samples, in disk order.

    Raises UsageError where the capture has no such column, or no sample at all; ShardError where `dataset.check` is set and a
    sample's bytes changed on disk.
    """
    if not len(dataset):
        raise UsageError(f"{dataset.path} holds no sample, so no {name} either.")
    return torch.cat([piece for shard in dataset.places.shards for piece in _pieces(shard, name, check=dataset.check)])


def _pieces(shard: Shard, name: str, *, check: bool) -> list[Tensor]:
    if check:  # a checksum is of one sample
        return [shard.checked_rows(position, name) for position in range(shard.M)]
    return [shard.rows(name, 0, shard.R)]
