"""The two data sets: random token ids, of lengths that are near each other or far apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Like short chats: equal within a factor of two.
NEAR = (129, 227)
# Like mixed data: log-normal around 256 tokens, one in six beyond 640.
WIDE = (16, 2048)
WIDE_MEDIAN, WIDE_SIGMA = 256.0, 0.92
SEED = 20


@dataclass(frozen=True)
class Samples:
    """Token ids (S,) int64 of every sample, in file order."""

    name: str
    ids: tuple[NDArray[np.int64], ...]

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)

    def first(self, tokens: int) -> Samples:
        """As many samples from the beginning as hold `tokens` tokens."""
        total = np.cumsum([len(ids) for ids in self.ids])
        return Samples(self.name, self.ids[: int(np.searchsorted(total, tokens)) + 1])


def near(tokens: int, vocabulary: int) -> Samples:
    """Samples of 129 to 227 tokens, evenly spread, `tokens` in all or one sample more."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(NEAR[0], NEAR[1] + 1, tokens // NEAR[0] + 1)
    return _samples("near", rng, lengths, tokens, vocabulary)


def wide(tokens: int, vocabulary: int) -> Samples:
    """Samples of 16 to 2048 tokens, log-normal, `tokens` in all or one sample more."""
    rng = np.random.default_rng(SEED)
    lengths = np.exp(rng.normal(np.log(WIDE_MEDIAN), WIDE_SIGMA, tokens // WIDE[0] + 1)).astype(np.int64)
    return _samples("wide", rng, lengths.clip(*WIDE), tokens, vocabulary)


def tiny(count: int, vocabulary: int) -> Samples:
    """`count` samples of 24 to 40 tokens."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(24, 41, count)
    return _samples("tiny", rng, lengths, int(lengths.sum()), vocabulary)


DATA_SETS = {"near": near, "wide": wide}


def _samples(name: str, rng: np.random.Generator, lengths: NDArray[np.int64], tokens: int, vocabulary: int) -> Samples:
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    return Samples(name, tuple(rng.integers(0, vocabulary, length) for length in lengths))
