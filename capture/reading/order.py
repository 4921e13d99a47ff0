"""In which order an epoch reads the samples: shuffled, and yet close together on disk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def epoch_order(
    shard_of: NDArray[np.integer], position: NDArray[np.integer], window: int, seed: int
) -> NDArray[np.int64]:
    """Return the (M,) sample indices of one epoch, each once.

    The shards come in random order, and of their samples, end to end, each stretch of `window` is shuffled: at any time the
    reads stay within the few shards that one stretch covers. The same numbers give the same order on every machine.

    shard_of, position: (M,), the shard of each sample and its place there.
    """
    bits = np.random.PCG64(seed)
    rank_of_shard = np.argsort(_shuffle(bits, int(shard_of.max()) + 1 if len(shard_of) else 0))
    order = np.lexsort((position, rank_of_shard[shard_of])) if len(shard_of) else np.empty(0, np.int64)
    for start in range(0, len(order), window):
        stretch = order[start : start + window]
        order[start : start + window] = stretch[_shuffle(bits, len(stretch))]
    return order


def _shuffle(bits: np.random.PCG64, count: int) -> NDArray[np.int64]:
    """Return a permutation from raw bits, whose stream numpy keeps between versions; that of its `permutation` it does not."""
    return np.argsort(bits.random_raw(count), kind="stable")
