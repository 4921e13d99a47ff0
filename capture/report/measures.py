"""Numbers of rows of hidden states: each function sees plain tensors and nothing else. T tokens, H hidden width."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def row_norms(rows_TH: Tensor) -> NDArray[np.float64]:
    """Return (T,) Euclidean length of each row, added up in float64: squares of large bfloat16 values leave float32's range."""
    norms: NDArray[np.float64] = torch.linalg.vector_norm(rows_TH, dim=-1, dtype=torch.float64).numpy()
    return norms


def row_cosines(one_TH: Tensor, other_TH: Tensor) -> NDArray[np.float64]:
    """Return (T,) cosine between the rows of two states; NaN where a row is all zero or not finite."""
    lengths = row_norms(one_TH) * row_norms(other_TH)
    dots = (one_TH.double() * other_TH.double()).sum(-1).numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.isfinite(lengths) & (lengths > 0), dots / lengths, np.nan)


def equal_rows(one_TH: Tensor, other_TH: Tensor) -> NDArray[np.bool_]:
    """Return (T,) whether both states have the same values in a row."""
    return (one_TH == other_TH).all(-1).numpy()


def repeats(rows_TH: Tensor, ids_T: Tensor, first_T: Tensor) -> int:
    """Rows that equal the row before although another token stands there.

    ids_T: (T,) token ids. first_T: (T,) bool, the first token of a sample, which has no row before.
    """
    candidates = (ids_T[1:] != ids_T[:-1]) & ~first_T[1:] & (rows_TH[1:, 0] == rows_TH[:-1, 0])
    places = candidates.nonzero().squeeze(-1)
    return int((rows_TH[places + 1] == rows_TH[places]).all(-1).sum())


def percentiles(values: ArrayLike, at: Sequence[float]) -> tuple[float, ...]:
    """Percentiles of the finite values; NaN where there are none."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if len(finite) == 0:
        return tuple(float("nan") for _ in at)
    return tuple(float(value) for value in np.percentile(finite, at))


def group_medians(values_N: NDArray[np.float64], group_N: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
    """Return (groups,) median of the values of each group; NaN for a group without values."""
    order = np.argsort(group_N, kind="stable")
    cuts = np.searchsorted(group_N[order], np.arange(1, groups))
    parts = np.split(values_N[order], cuts)
    return np.array([np.median(part) if len(part) else np.nan for part in parts])


def group_shares(marks_N: NDArray[np.uint8], group_N: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
    """Return (groups,) share of marked entries of each group; NaN for a group without entries."""
    counts = np.bincount(group_N, minlength=groups)
    marked = np.bincount(group_N, weights=marks_N, minlength=groups)
    return np.where(counts > 0, marked / np.maximum(counts, 1), np.nan)


def relative_sizes(mean_abs_H: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (H,) mean size of each dimension over that of the median dimension; NaN where that is 0."""
    middle = float(np.median(mean_abs_H)) if len(mean_abs_H) else 0.0
    return mean_abs_H / middle if middle > 0 else np.full(len(mean_abs_H), np.nan)


def mean_pair_cosine(direction_sum_H: NDArray[np.float64], count: int) -> float:
    """Return the mean cosine over all pairs of `count` unit vectors that add up to this one; NaN for fewer than two."""
    if count < 2:
        return float("nan")
    return float((direction_sum_H @ direction_sum_H - count) / (count * (count - 1)))
