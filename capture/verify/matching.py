"""The state of the model that some stored rows are: a search over every state and row shift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .declared import State

SHIFTS = (-1, 0, 1)
# A match is bit-equal, or its median row error is at most this much.
CLOSE = 1e-3
# In half precision another batch rounds otherwise. Measured on a model of 30 layers in bfloat16: rows 0.005 to 0.015 from
# float32 (medians), neighboring boundaries 0.24 to 0.86 from each other, neighboring rows 0.65 to 0.96. What is within this
# is a match if it is also at most half as far away as the declared state.
CLOSE_IN_HALF = 0.1
# The medians of a few hundred rows decide as well as those of all.
ROWS_SEARCHED = 256
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Match:
    """The distance of stored rows from one state.

    shift: stored row t is beside row t + shift of the state. error: median over rows of |a - b| / |b|.
    """

    state: State
    shift: int
    bit_equal: bool
    error: float

    @property
    def rank(self) -> tuple[bool, float, int]:
        return (not self.bit_equal, self.error, abs(self.shift))


def row_errors(rows: Tensor, truth: Tensor) -> Tensor:
    """Return (S,) float64: |a - b| / |b| of each row of two (S, H) tensors; 0 where they are equal, inf where it is no number."""
    a, b = rows.double(), truth.double()
    gap = torch.linalg.vector_norm(a - b, dim=-1)
    errors: Tensor = (gap / torch.linalg.vector_norm(b, dim=-1)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    equal = gap == 0
    if rows.dtype == truth.dtype:
        equal |= ~differing_rows(rows, truth)  # NaNs of one kind
    errors[equal] = 0.0
    return errors


def differing_rows(rows: Tensor, truth: Tensor) -> Tensor:
    """Return (S,) bool: rows whose bits are not those of `truth`, of the same dtype; equal NaNs are equal."""
    integers = _BITS[rows.dtype.itemsize]
    return torch.ne(rows.contiguous().view(integers), truth.contiguous().view(integers)).any(-1)


def closest_other(stored: Tensor, states: Mapping[State, Tensor], declared: State) -> Match | None:
    """Return the best match among all states and row shifts but the declared one.

    stored: (S, H); states: (S, H) each, of the stored dtype, on the CPU.
    """
    found = [
        match_of(stored, state, truth, shift)
        for state, truth in states.items()
        for shift in SHIFTS
        if (state, shift) != (declared, 0) and truth.shape == stored.shape and _enough_rows(len(stored), shift)
    ]
    return min(found, key=lambda match: match.rank, default=None)


def is_better(match: Match, declared: Match, *, half: bool) -> bool:
    """Return whether rows are `match` and not what they are declared to be. half: they were computed in half precision."""
    if declared.bit_equal:
        return False
    if match.bit_equal or match.error <= CLOSE < declared.error:
        return True
    return half and match.error <= CLOSE_IN_HALF and match.error <= declared.error / 2


def match_of(stored: Tensor, state: State, truth: Tensor, shift: int = 0) -> Match:
    """Compare as many rows as are there on both sides."""
    S = len(stored)
    rows = torch.linspace(max(0, -shift), min(S, S - shift) - 1, min(ROWS_SEARCHED, S - abs(shift))).round().long()
    a, b = stored[rows], truth[rows + shift]
    return Match(state, shift, not bool(differing_rows(a, b).any()), float(row_errors(a, b).median()))


def _enough_rows(S: int, shift: int) -> bool:
    # Two rows of a shifted match at least: the first row of a sample is much the same whatever the text.
    return S - abs(shift) >= (2 if shift else 1)
