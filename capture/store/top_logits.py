"""The share of the model's distribution that the stored top logits of a row hold together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .shard import Shard

COLUMNS = ("topk_logits", "topk_logsumexp")
# Rows looked at in each shard, from its beginning: enough for a mean, a fraction of a second to read.
ROWS_PER_SHARD = 4096
SHARES = ("0.05", "0.5", "0.95")


def kept_probability(topk_logits: Tensor, topk_logsumexp: Tensor) -> Tensor:
    """Return (R,) float32 in [0, 1]: the probability of the k stored tokens together; NaN where none are stored.

    Args:
        topk_logits: (R, k) float32, NaN in places without one.
        topk_logsumexp: (R,) float32, over the whole vocabulary.
    """
    stored = torch.where(topk_logits.isnan(), -torch.inf, topk_logits)
    return (stored - topk_logsumexp[:, None]).exp().sum(dim=1)


def kept_probabilities(shard: Shard, most: int = ROWS_PER_SHARD) -> NDArray[np.float32]:
    """Return `kept_probability` of the first `most` rows of a shard, without rows that have none; empty without top logits."""
    if not set(COLUMNS) <= {column.name for column in shard.columns}:
        return np.empty(0, np.float32)
    with shard:  # of thousands none stays open
        logits, total = (shard.rows(name, 0, min(most, shard.R)) for name in COLUMNS)
    kept: NDArray[np.float32] = kept_probability(logits, total).numpy()
    return kept[np.isfinite(kept)]


@dataclass(frozen=True)
class KeptMass:
    """The probability that the stored top logits of a row hold together, over the rows of a folder.

    Attributes:
        mean: of all rows.
        quantiles: the probability that a share of the rows does not exceed, by that share: 0.05, 0.5 and 0.95.
    """

    mean: float
    quantiles: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "quantiles": self.quantiles}


def kept_mass(shards: Iterable[Shard]) -> KeptMass | None:
    """Return mean and quantiles of `kept_probabilities` over all shards; None where no row has top logits."""
    kept = [part for shard in shards if len(part := kept_probabilities(shard))]
    if not kept:
        return None
    rows = np.concatenate(kept)
    found = np.quantile(rows, [float(share) for share in SHARES])
    return KeptMass(float(rows.mean()), dict(zip(SHARES, found.tolist(), strict=True)))
