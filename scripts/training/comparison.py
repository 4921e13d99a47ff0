"""Whether one way of serving a drafter is accepted more than another, over the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .acceptance import Acceptance

RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """Ours less theirs.

    Attributes:
        difference: of the mean tokens per step.
        low, high: the middle 95 % of that difference over prompts drawn anew.
        better, worse: prompts on which ours took more, or fewer, tokens per step.
        p_value: of a two-sided sign test on these prompts.
    """

    difference: float
    low: float
    high: float
    better: int
    worse: int
    p_value: float


def compare(ours: Sequence[Acceptance], theirs: Sequence[Acceptance]) -> Comparison:
    """Compare two ways of serving, prompt by prompt."""
    low, high = np.quantile(resampled_lengths(ours) - resampled_lengths(theirs), (0.025, 0.975))
    gains = [our.length - their.length for our, their in zip(ours, theirs, strict=True)]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    difference = sum(ours, Acceptance()).length - sum(theirs, Acceptance()).length
    return Comparison(difference, float(low), float(high), better, worse, sign_test(better, worse))


def standard_error(counts: Sequence[Acceptance]) -> float:
    """Of the mean tokens per step, over prompts drawn anew."""
    return float(resampled_lengths(counts).std())


def resampled_lengths(counts: Sequence[Acceptance]) -> NDArray[np.float64]:
    """(RESAMPLES,) the mean tokens per step on as many prompts drawn with repetition; the draws depend on their number alone."""
    tokens, steps = np.array([(count.tokens, count.steps) for count in counts]).T
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    lengths: NDArray[np.float64] = tokens[drawn].sum(1) / steps[drawn].sum(1)
    return lengths


def sign_test(better: int, worse: int) -> float:
    """How likely fair coins are to fall at least as unevenly, either way."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return min(1.0, 2 * tail)
