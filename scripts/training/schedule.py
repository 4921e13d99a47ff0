"""The learning rate over a training."""

from __future__ import annotations

import math

WARMUP, LAST = 0.05, 0.1


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Of step 0..steps-1: a linear rise over the first twentieth, then half a cosine down to a tenth of the peak."""
    rise = max(round(WARMUP * steps), 1)
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(steps - rise, 1)
    return peak * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done)))
