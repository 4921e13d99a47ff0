"""One column of a whole capture."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.errors import UsageError
from ..store import CapturedDataset


def whole_column(dataset: CapturedDataset, name: str) -> Tensor:
    """Return the rows of one column, shard after shard, without reading any other: (R, ...) over all samples, in disk order.

    Raises UsageError where the capture has no such column, or no sample at all.
    """
    if not len(dataset):
        raise UsageError(f"{dataset.path} holds no sample, so no {name} either.")
    return torch.cat([shard.rows(name, 0, shard.R) for shard in dataset.places.shards])
