"""What the rows of each stored state look like, and how each state differs from the one before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dimensions import DimensionSums
from .measures import equal_rows, repeats, row_cosines, row_norms
from .reading import Chunk
from .states import State, rows_of


@dataclass(frozen=True, eq=False)
class StateProfile:
    """One state over the N rows that were read.

    norms: (N,) float64, length of each row.
    non_finite, all_zero: rows with such values. repeated: rows equal to the one before under another token.
    variances, mean_abs: (H,) of each dimension. constant: (D,) dimensions with one value in all rows.
    pair_cosine: the mean cosine between two rows. These four leave out the first row of each sample, where many models
    keep a few very large values, and rows that are not finite.
    """

    state: State
    norms: NDArray[np.float64]
    non_finite: int
    all_zero: int
    repeated: int
    variances: NDArray[np.float64]
    mean_abs: NDArray[np.float64]
    constant: NDArray[np.int64]
    pair_cosine: float


@dataclass(frozen=True, eq=False)
class PairProfile:
    """Two neighbouring states, row by row.

    cosines: (N,) float64. equal: rows with equal values in both, first rows left out: beside very large values there,
    what a layer adds can be lost in rounding.
    """

    before: State
    after: State
    cosines: NDArray[np.float64]
    equal: int


@dataclass(frozen=True, eq=False)
class RowProfile:
    """Everything measured on the N rows that were read.

    sample: (N,) int64, which of the samples read a row belongs to. first: (N,) bool, the first row of a sample.
    loss_mask: (N,) uint8, empty where the shards have none.
    """

    states: tuple[StateProfile, ...]
    pairs: tuple[PairProfile, ...]
    sample: NDArray[np.int64]
    first: NDArray[np.bool_]
    loss_mask: NDArray[np.uint8]


class _StateScan:
    """Collects one `StateProfile`."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._norms: list[NDArray[np.float64]] = []
        self._non_finite = self._all_zero = self._repeated = 0
        self._sums: DimensionSums | None = None

    def add(self, rows_TH: Tensor, ids_T: Tensor | None, first_T: Tensor) -> None:
        norms = row_norms(rows_TH)
        finite = torch.isfinite(rows_TH).all(-1)
        self._norms.append(norms)
        self._non_finite += int((~finite).sum())
        self._all_zero += int((norms == 0).sum())
        if ids_T is not None:
            self._repeated += repeats(rows_TH, ids_T, first_T)
        if self._sums is None:
            self._sums = DimensionSums(rows_TH.shape[-1])
        self._sums.add(rows_TH[finite & ~first_T])

    def profile(self) -> StateProfile:
        sums = self._sums or DimensionSums(0)
        return StateProfile(
            self.state, _joined(self._norms, np.float64), self._non_finite, self._all_zero, self._repeated,
            sums.variances(), sums.mean_abs(), sums.constant(), sums.pair_cosine(),
        )  # fmt: skip


class _PairScan:
    """Collects one `PairProfile`."""

    def __init__(self, before: State, after: State) -> None:
        self.before, self.after = before, after
        self._cosines: list[NDArray[np.float64]] = []
        self._equal = 0

    def add(self, before_TH: Tensor, after_TH: Tensor, first_T: Tensor) -> None:
        self._cosines.append(row_cosines(before_TH, after_TH))
        self._equal += int((equal_rows(before_TH, after_TH) & ~first_T.numpy()).sum())

    def profile(self) -> PairProfile:
        return PairProfile(self.before, self.after, _joined(self._cosines, np.float64), self._equal)


class RowScan:
    """Takes chunks one after the other; two states of a chunk are in float32 at a time."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = [_StateScan(state) for state in states]
        self._pairs = [_PairScan(one, other) for one, other in pairwise(states)]
        self._sample: list[NDArray[np.int64]] = []
        self._first: list[NDArray[np.bool_]] = []
        self._marks: list[NDArray[np.uint8]] = []

    def add(self, chunk: Chunk) -> None:
        """Measure the rows of a chunk."""
        self._sample.append(chunk.sample)
        self._first.append(chunk.first)
        if "loss_mask" in chunk.columns:
            self._marks.append(chunk.columns["loss_mask"].numpy())
        ids, first = chunk.columns.get("input_ids"), torch.from_numpy(chunk.first)
        before: Tensor | None = None
        for place, scan in enumerate(self._states):
            rows = rows_of(scan.state, chunk.columns)
            scan.add(rows, ids, first)
            if before is not None:
                self._pairs[place - 1].add(before, rows, first)
            before = rows

    def profile(self) -> RowProfile:
        """What was found."""
        return RowProfile(
            tuple(scan.profile() for scan in self._states),
            tuple(scan.profile() for scan in self._pairs),
            _joined(self._sample, np.int64),
            _joined(self._first, np.bool_),
            _joined(self._marks, np.uint8),
        )


def _joined(parts: list[Any], dtype: type[np.generic]) -> NDArray[Any]:

    return np.concatenate(parts) if parts else np.empty(0, dtype)
