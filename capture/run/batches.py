"""Samples cut into batches: neighbors of near-equal length, under a budget of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...hooks import RealPositions
from ...models.length_limits import NO_LIMITS, LengthLimits

# A batch ends early where the next sample would make more than this share of it padding: padding costs as much as tokens do.
MOST_PADDING = 0.125


class Place(NamedTuple):
    """Where a batch begins: at a position of a sample of a shard."""

    sample: int
    position: int = 0


@dataclass(frozen=True)
class Chunk:
    """Positions `begin` to `end` (exclusive) of a sample of `length` tokens, run behind the cache of those before them."""

    begin: int
    end: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.end == self.length


@dataclass(frozen=True)
class TokenBatch:
    """Samples `first` to `first + B - 1` of a shard, which are one run of its rows.

    Attributes:
        input_ids: (B, S) int64 on the CPU, padded on the right with id 0.
        positions: which of them are real.
        inputs: of one sample with images, what the model takes in place of `input_ids`, which are the expanded ones.
        chunk: which part of its one sample this is; None where samples are whole.
    """

    first: int
    input_ids: Tensor
    positions: RealPositions
    inputs: Mapping[str, Tensor] | None = None
    chunk: Chunk | None = None

    @property
    def samples(self) -> range:
        """Places of the samples in their shard."""
        return range(self.first, self.first + self.positions.B)

    @property
    def ends_samples(self) -> bool:
        """Return whether no sample of it has more rows to come."""
        return self.chunk is None or self.chunk.is_last

    @property
    def next(self) -> Place:
        """Where the batch after it begins."""
        if self.chunk is not None and not self.chunk.is_last:
            return Place(self.first, self.chunk.end)
        return Place(self.samples.stop)


@dataclass(frozen=True)
class BatchRule:
    """The rule that cuts samples into batches, for any budget.

    Attributes:
        most_padding: share of a batch's positions that may be padding.
        limits: a batch holds no samples on both sides of one of its `cuts`, and a sample of more positions than `selects_past`
            is alone in its forward. For models that compute every row of
            a batch by its longest one (rotary frequencies that change at a length, for one).
        chunk: a sample of more positions runs alone, in chunks of so many; None: every sample runs whole.
    """

    most_padding: float = MOST_PADDING
    limits: LengthLimits = NO_LIMITS
    chunk: int | None = None

    def end(self, lengths: NDArray[np.int64], first: int, budget: int) -> int:
        """Return where the batch that begins with sample `first` ends (exclusive).

        lengths: (M,), ascending. The batch has at most `budget` positions, padding included, but always one sample.
        """
        candidates = lengths[first : first + budget]  # each sample has a token at least
        counts = np.arange(1, len(candidates) + 1)
        positions = counts * candidates
        real = np.cumsum(candidates)
        fits = (positions <= budget) & (positions - real <= self.most_padding * positions)
        if self.limits.cuts:
            side = np.searchsorted(self.limits.cuts, candidates)  # a sample of just the limit is below it
            fits &= side == side[0]
        for alone_past in (self.limits.selects_past, self.chunk):
            if alone_past is not None:
                fits &= candidates <= alone_past
        fits[0] = True
        return first + int(np.argmin(fits)) if not fits.all() else first + len(candidates)


@dataclass(frozen=True)
class ImageInputs:
    """The samples with images, and the model's inputs for each.

    Attributes:
        places: (I,) of the samples, ascending.
        of: the inputs of the sample at a place that is one of them.
    """

    places: NDArray[np.int64]
    of: Callable[[int], Mapping[str, Tensor]]

    def first_from(self, place: int) -> int | None:
        """Return the first place from `place` on that has images."""
        at = int(np.searchsorted(self.places, place))
        return int(self.places[at]) if at < len(self.places) else None


@dataclass(frozen=True)
class SampleRows:
    """M samples in the order of their lengths, one after the other in R rows.

    Attributes:
        ids: of the samples, for messages.
        row_offsets: (M+1,) int64.
        input_ids: (R,) int32.
        images: None where no sample has any.
    """

    ids: Sequence[str]
    row_offsets: NDArray[np.int64]
    input_ids: Tensor
    images: ImageInputs | None = None

    @property
    def M(self) -> int:
        return len(self.row_offsets) - 1

    def batch(self, place: Place, budget: int, rule: BatchRule) -> TokenBatch:
        """Return the batch that begins at `place`; a sample with images is alone in its forward, and whole."""
        first = place.sample
        lengths = np.diff(self.row_offsets[first : first + budget + 1])
        stop = first + rule.end(lengths, 0, budget)
        image = None if self.images is None else self.images.first_from(first)
        if self.images is None or image is None or image >= stop:
            if rule.chunk is not None and lengths[0] > rule.chunk:
                return self._chunk(place, rule.chunk)
            return self._tokens(first, stop)
        if image > first:
            return self._tokens(first, image)
        tokens = self._tokens(first, first + 1)
        return TokenBatch(first, tokens.input_ids, tokens.positions, self.images.of(first))

    def _chunk(self, place: Place, most: int) -> TokenBatch:
        start, stop = self.row_offsets[place.sample : place.sample + 2].tolist()
        end = min(place.position + most, stop - start)
        ids = self.input_ids[start + place.position : start + end].to(torch.int64)[None]
        chunk = Chunk(place.position, end, stop - start)
        return TokenBatch(place.sample, ids, RealPositions.all(1, ids.shape[1]), chunk=chunk)

    def _tokens(self, first: int, stop: int) -> TokenBatch:
        lengths = np.diff(self.row_offsets[first : stop + 1])
        begin, end = int(self.row_offsets[first]), int(self.row_offsets[stop])
        B, S = len(lengths), int(lengths.max())
        ids = torch.zeros(B, S, dtype=torch.int64)
        ids[torch.arange(S) < torch.from_numpy(lengths)[:, None]] = self.input_ids[begin:end].to(torch.int64)
        return TokenBatch(first, ids, RealPositions(S, (0,) * B, tuple(lengths.tolist())))
