"""Statistics of the rows of each stored state, and of its difference from the state before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..store import StoredState
from .dimensions import DimensionSums
from .measures import equal_rows, repeats, row_cosines, row_norms
from .reading import Chunk


@dataclass(frozen=True, eq=False)
class StateProfile:
    """One state over the N rows that were read.

    norms: (N,) float64, length of each row.
    non_finite, all_zero: rows with such values. repeated: rows equal to the one before under another token.
    variances, mean_abs: (H,) of each dimension. constant: (D,) dimensions with one value in all rows.
    pair_cosine: the mean cosine between two rows. These four leave out the first row of each sample, where many models
    keep a few very large values, and rows that are not finite.
    """

    state: StoredState
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
    """Two neighboring states, row by row.

    cosines: (N,) float64. equal: rows with equal values in both, first rows left out: beside very large values there,
    what a layer adds can be lost in rounding.
    """

    before: StoredState
    after: StoredState
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

    def __init__(self, state: StoredState, rows: int) -> None:
        self.state = state
        self._norms = np.empty(rows)
        self._non_finite = self._all_zero = self._repeated = 0
        self._sums: DimensionSums | None = None

    def add(self, place: slice, rows_TH: Tensor, ids_T: Tensor | None, first_T: Tensor) -> None:
        norms = row_norms(rows_TH)
        finite = torch.isfinite(rows_TH).all(-1)
        self._norms[place] = norms
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
            self.state, self._norms, self._non_finite, self._all_zero, self._repeated,
            sums.variances(), sums.mean_abs(), sums.constant(), sums.pair_cosine(),
        )  # fmt: skip


class _PairScan:
    """Collects one `PairProfile`."""

    def __init__(self, before: StoredState, after: StoredState, rows: int) -> None:
        self.before, self.after = before, after
        self._cosines = np.empty(rows)
        self._equal = 0

    def add(self, place: slice, before_TH: Tensor, after_TH: Tensor, first_T: Tensor) -> None:
        self._cosines[place] = row_cosines(before_TH, after_TH)
        self._equal += int((equal_rows(before_TH, after_TH) & ~first_T.numpy()).sum())

    def profile(self) -> PairProfile:
        return PairProfile(self.before, self.after, self._cosines, self._equal)


class RowScan:
    """Takes the chunks of `rows` rows one after the other; two states of a chunk are in float32 at a time.

    What is kept has its place from the start: small arrays kept between the large ones of each chunk would leave holes
    that the next chunk does not fit into, and memory would grow by 30 MB a chunk (measured with glibc).
    """

    def __init__(self, states: Sequence[StoredState], rows: int) -> None:
        self._states = [_StateScan(state, rows) for state in states]
        self._pairs = [_PairScan(one, other, rows) for one, other in pairwise(states)]
        self._sample = np.empty(rows, np.int64)
        self._first = np.empty(rows, np.bool_)
        self._marks = np.empty(rows, np.uint8)
        self._marked = self._done = 0

    def add(self, chunk: Chunk) -> None:
        """Measure the rows of a chunk."""
        place = slice(self._done, self._done + len(chunk.sample))
        self._sample[place], self._first[place] = chunk.sample, chunk.first
        if "loss_mask" in chunk.columns:
            self._marks[place] = chunk.columns["loss_mask"].numpy()
            self._marked = place.stop
        self._measure(place, chunk)
        self._done = place.stop

    def profile(self) -> RowProfile:
        """Return the profile of all rows added so far."""
        return RowProfile(
            tuple(scan.profile() for scan in self._states),
            tuple(scan.profile() for scan in self._pairs),
            self._sample,
            self._first,
            self._marks[: self._marked],
        )

    def _measure(self, place: slice, chunk: Chunk) -> None:
        ids, first = chunk.columns.get("input_ids"), torch.from_numpy(chunk.first)
        before: Tensor | None = None
        for number, scan in enumerate(self._states):
            rows = scan.state.rows(chunk.columns).to(torch.float32)
            scan.add(place, rows, ids, first)
            if before is not None:
                self._pairs[number - 1].add(place, before, rows, first)
            before = rows
