"""A test of whether rows have left a final norm, from the rows and the norm alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# What a norm made, divided by its weight, has one length; rounding to bfloat16 spreads it by less than this share of it.
SPREAD = 0.02
LEAST_ROWS = 8
# Elements that the weight makes this much smaller than others are rounding more than value.
LEAST_WEIGHT = 1e-2


@torch.inference_mode()
def has_left(norm: nn.Module, rows: Tensor) -> bool | None:
    """Return whether `rows` (T, H) are an output of `norm`; None where too few rows, or the norm's own outputs, do not show it.

    rows: on the norm's device and of its dtype.
    """
    if len(rows) < LEAST_ROWS or not bool(torch.isfinite(rows).all()):
        return None
    made = norm(rows)
    for weight, bias in _scales(norm, rows):
        if _spread(made, weight, bias) < SPREAD:
            return _spread(rows, weight, bias) < SPREAD
    return None


def _scales(norm: nn.Module, rows: Tensor) -> Iterator[tuple[Tensor, Tensor | float]]:
    """Yield the possible scales of a norm: its weight, its weight plus one (Gemma), or none."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    shift = bias.float() if isinstance(bias, Tensor) else 0.0
    if isinstance(weight, Tensor):
        yield weight.float(), shift
        yield 1 + weight.float(), shift
    yield torch.ones(rows.shape[-1], device=rows.device), shift


def _spread(rows: Tensor, weight: Tensor, bias: Tensor | float) -> float:
    kept = weight.abs() > LEAST_WEIGHT * weight.abs().max()
    lengths = torch.linalg.vector_norm(((rows.float() - bias) / weight)[:, kept], dim=-1)
    return float(lengths.std(correction=0) / lengths.mean())
