"""Statistics of each of the H dimensions over rows that come in chunks."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .measures import mean_pair_cosine, row_norms


class DimensionSums:
    """Takes (T, H) chunks of finite rows and keeps a few values per dimension, in float64.

    Means and squared deviations of chunks are merged as such: a difference of sums of squares would lose a variance that
    is small beside its mean.
    """

    def __init__(self, H: int) -> None:
        self.count = 0
        self._mean = np.zeros(H)
        self._deviations = np.zeros(H)
        self._abs = np.zeros(H)
        self._low, self._high = np.full(H, np.inf), np.full(H, -np.inf)
        self._directions = np.zeros(H)
        self._directed = 0

    def add(self, rows_TH: Tensor) -> None:
        """Take in finite rows, float32."""
        T = len(rows_TH)
        if T == 0:
            return
        rows = rows_TH.double()
        mean = rows.mean(0).numpy()
        total, shift = self.count + T, mean - self._mean
        self._deviations += ((rows - rows.mean(0)) ** 2).sum(0).numpy() + shift**2 * (self.count * T / total)
        self._mean += shift * (T / total)
        self._abs += rows.abs().sum(0).numpy()
        self._low = np.minimum(self._low, rows.amin(0).numpy())
        self._high = np.maximum(self._high, rows.amax(0).numpy())
        self.count = total
        self._add_directions(rows)

    def variances(self) -> NDArray[np.float64]:
        """Return (H,) variance of each dimension over the rows."""
        return self._deviations / max(self.count, 1)

    def mean_abs(self) -> NDArray[np.float64]:
        """Return (H,) mean absolute value of each dimension."""
        return self._abs / max(self.count, 1)

    def constant(self) -> NDArray[np.int64]:
        """Return the dimensions that have one value in all rows; none before there are two rows."""
        return np.flatnonzero(self._low == self._high) if self.count > 1 else np.empty(0, np.int64)

    def pair_cosine(self) -> float:
        """Return the mean cosine over all pairs of rows."""
        return mean_pair_cosine(self._directions, self._directed)

    def _add_directions(self, rows: Tensor) -> None:
        lengths = torch.from_numpy(row_norms(rows))
        kept = lengths > 0
        self._directions += (rows[kept] / lengths[kept, None]).sum(0).numpy()
        self._directed += int(kept.sum())
