"""The bound on differences of rows that rounding alone explains.

In float32 the worst row counts. In half precision a router may flip and move single rows by a fifth, so the median row counts,
and what is allowed follows from what the same model showed where it must be right: faults of a tenth would hide under a
constant bound that leaves room for every model of experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_FLOAT32 = 1e-3
"""Wrong rows are off by a hundredth and more; chunked recurrences of right ones by up to 1e-4."""
_HALF_LEAST, _HALF_MOST, _TIMES = 0.06, 0.15, 4.0
"""Medians of right bfloat16 rows: at most 0.012 in 80 tiny model types, 0.016 in one of 30 layers; of wrong ones from 0.087."""


def computes_in_half(model: nn.Module) -> bool:
    """Return whether weights of `model` are in half precision; its residual stream may be in float32 all the same."""
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())


def row_error(rows: Tensor, expected: Tensor, *, half: bool) -> float:
    """Return by how much of their norm rows (R, H) differ from `expected` (R, H): the worst row, in half precision the median."""
    errors = row_errors(rows, expected)
    return float(errors.quantile(0.5) if half else errors.max())


def row_errors(rows: Tensor, expected: Tensor) -> Tensor:
    """Return (R,) float64: the distance of each row (R, H) from the expected one, as a part of its norm."""
    difference = torch.linalg.vector_norm(rows.double() - expected.double(), dim=-1)
    errors: Tensor = difference / torch.linalg.vector_norm(expected.double(), dim=-1).clamp_min(1e-30)
    return errors


def most_error(*, half: bool, seen: float | None = None) -> float:
    """Return the largest `row_error` that rounding explains.

    seen: the error of rows of the same model that must be right, where there are such; only half precision depends on it.
    """
    if not half:
        return _FLOAT32
    return _HALF_MOST if seen is None else min(max(_HALF_LEAST, _TIMES * seen), _HALF_MOST)


def error_beyond_rounding(parts: Iterable[tuple[Tensor, Tensor]], *, half: bool) -> float | None:
    """Return the error of the first part that differs by more than rounding, None where none does.

    parts: rows (R, H) and expected ones. The first part shows what rounding costs the model: it is one that runs where its
    company can hardly change it.
    """
    seen = None
    for rows, expected in parts:
        error = row_error(rows, expected, half=half)
        if not error <= most_error(half=half, seen=seen):
            return error
        seen = error if seen is None else seen
    return None
