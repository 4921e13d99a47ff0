"""A planned shard cut into batches: neighbours of near-equal length, under a budget of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...hooks import RealPositions

# A batch ends early where the next sample would make more than this share of it padding: padding costs as much as tokens do.
MOST_PADDING = 0.125


@dataclass(frozen=True)
class TokenBatch:
    """Samples `first` to `first + B - 1` of a shard, which are one run of its rows.

    Attributes:
        input_ids: (B, S) int64 on the CPU, padded on the right with id 0.
        positions: which of them are real.
        row_start: the shard's row of the first token.
        inputs: of one sample with images, what the model takes in place of `input_ids`, which are the expanded ones.
    """

    first: int
    row_start: int
    input_ids: Tensor
    positions: RealPositions
    inputs: Mapping[str, Tensor] | None = None

    @property
    def samples(self) -> range:
        """Places of the samples in their shard."""
        return range(self.first, self.first + self.positions.B)


def batch_end(lengths: NDArray[np.int64], first: int, budget: int, most_padding: float = MOST_PADDING) -> int:
    """Where the batch that begins with sample `first` ends (exclusive).

    lengths: (M,), ascending. The batch has at most `budget` positions, padding included, but always one sample.
    most_padding: share of them that may be padding.
    """
    candidates = lengths[first : first + budget]  # each sample has a token at least
    counts = np.arange(1, len(candidates) + 1)
    positions = counts * candidates
    real = np.cumsum(candidates)
    fits = (positions <= budget) & (positions - real <= most_padding * positions)
    fits[0] = True
    return first + int(np.argmin(fits)) if not fits.all() else first + len(candidates)


def token_batch(first: int, stop: int, row_offsets: NDArray[np.int64], input_ids: Tensor) -> TokenBatch:
    """The batch of samples first..stop-1; input_ids: (R,) int32, the shard's tokens in row order."""
    lengths = np.diff(row_offsets[first : stop + 1])
    begin, end = int(row_offsets[first]), int(row_offsets[stop])
    B, S = len(lengths), int(lengths.max())
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[torch.arange(S) < torch.from_numpy(lengths)[:, None]] = input_ids[begin:end].to(torch.int64)
    return TokenBatch(first, begin, ids, RealPositions(S, (0,) * B, tuple(lengths.tolist())))
