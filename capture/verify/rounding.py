"""A bound: rows that differ from a plain forward by rounding alone.

No constant bounds what another batch does to half precision (row errors of 0.07 were seen on a small model, 0.18 where
experts are chosen). So the rows are held against a float32 forward of the same weights, and so are those of a single forward
in half precision: both are roundings of one truth, and neither may be farther from it than the other by more than a quarter,
at the median and at the 99th percentile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FACTOR = 1.25
QUANTILES = (0.5, 0.99)
# How far the quantiles of a few rows may be off their true places: standard errors of the rank of each.
STANDARD_ERRORS = 3.0
# A row that is half its length away from the truth, while rounding moves no row of the sample a quarter as far.
LOST = 0.5
LOST_FACTOR = 4.0
# Float32 rows of another batch. Stored narrower, a row moves by that much where a value lies between two stored ones.
FLOAT32_LIMIT = 1e-5
NARROWED_LIMIT = 1e-3


def allowed_error(stored: torch.dtype, *, half: bool, bits_due: bool) -> str:
    """Return how far rows may be from a plain forward, in words, as they are judged.

    stored: dtype of the rows. half: whether the run computed in half precision. bits_due: whether it promised equal bits.
    """
    if bits_due:
        return "none, the run is exact"
    if half:
        return f"{FACTOR} x the rounding error of one plain forward"
    return f"{FLOAT32_LIMIT if stored == torch.float32 else NARROWED_LIMIT:g}"


def exceeds_rounding(stored: Tensor, single: Tensor) -> str | None:
    """Return, in words, which row errors (R,) exceed rounding, of stored rows and of a single forward against float32.

    The two round independently, so both quantiles are those of a few draws, and what could be chance is no fault. Quantiles
    are errors of some row: between a number and infinity there is nothing to interpolate.
    """
    for quantile in QUANTILES:
        slack = STANDARD_ERRORS * math.sqrt(quantile * (1 - quantile) / len(single))
        found = float(stored.quantile(max(0.0, quantile - slack), interpolation="lower"))
        allowed = FACTOR * float(single.quantile(min(1.0, quantile + slack), interpolation="higher"))
        if found > allowed:
            name = "median" if quantile == 0.5 else f"{quantile:.0%} quantile"
            return f"the {name} of its row errors against float32 is {found:.2g}, rounding explains {allowed:.2g}"
    return None


def lost_rows(stored: Tensor, single: Tensor) -> Tensor:
    """Return (S,) bool: rows of one sample that are no rounding of the truth, whatever the others are."""
    return stored > max(LOST, LOST_FACTOR * float(single.max()))
