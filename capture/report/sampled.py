"""Statistics of what generation recorded: sampling supports and log-probabilities."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .reading import Chunk


@dataclass(frozen=True, eq=False)
class SampledProfile:
    """The rows that something was sampled from.

    supports: (n,) int64, how many tokens each row was sampled from; 0 where that is not known.
    of_model, of_sampler: (m,) float32 log-probability of the sampled token under the model and under what it was sampled
    from, of rows that have both.
    top_differences: (d,) float32, |logprob - the same from the stored top logits|, of rows that have both.
    sure_misses: rows sampled from one token whose sampling log-probability is not 0.
    """

    supports: NDArray[np.int64]
    of_model: NDArray[np.float32]
    of_sampler: NDArray[np.float32]
    top_differences: NDArray[np.float32]
    sure_misses: int


class SampledScan:
    """Takes the chunks of `rows` rows one after the other; what is kept has its place from the start, as in `RowScan`."""

    def __init__(self, rows: int) -> None:
        self._supports = np.full(rows, -1)
        self._of_model, self._of_sampler, self._differences = (np.full(rows, np.nan, np.float32) for _ in range(3))
        self._sure_misses = self._done = 0
        self._recorded = False

    def add(self, chunk: Chunk) -> None:
        """Look at the rows of a chunk; there is nothing in those of an offline capture."""
        columns = chunk.columns
        place = slice(self._done, self._done + len(chunk.sample))
        self._done = place.stop
        if "sampling_mask_lengths" in columns:
            self._supports[place] = columns["sampling_mask_lengths"].numpy()
        for name, kept in (("logprobs", self._of_model), ("sampling_logprobs", self._of_sampler)):
            if name in columns:
                kept[place] = columns[name].numpy()
        if {"sampling_mask_lengths", "sampling_logprobs"} <= columns.keys():
            self._sure_misses += _sure_misses(columns["sampling_mask_lengths"], columns["sampling_logprobs"])
        if {"logprobs", "output_ids", "topk_ids"} <= columns.keys():
            self._differences[place] = top_differences(columns).numpy()
        self._recorded |= not columns.keys().isdisjoint(("sampling_mask_lengths", "logprobs", "sampling_logprobs"))

    def profile(self) -> SampledProfile | None:
        """Return the profile of all rows added so far; None if nothing was recorded."""
        if not self._recorded:
            return None
        both = np.isfinite(self._of_model) & np.isfinite(self._of_sampler)
        return SampledProfile(
            self._supports[self._supports >= 0],
            self._of_model[both],
            self._of_sampler[both],
            self._differences[np.isfinite(self._differences)],
            self._sure_misses,
        )


def top_differences(columns: dict[str, Tensor]) -> Tensor:
    """Return (T,) |logprobs - (topk_logits - topk_logsumexp)|, NaN where the sampled token is not among the k stored ones."""
    wanted = columns["output_ids"][:, None]
    hits = (columns["topk_ids"] == wanted) & (wanted >= 0)
    from_top = columns["topk_logits"] - columns["topk_logsumexp"][:, None]
    differences = (columns["logprobs"][:, None] - from_top).abs()
    return differences.where(hits, torch.inf).amin(-1).nan_to_num(torch.nan, torch.nan)


def _sure_misses(lengths: Tensor, logprobs: Tensor) -> int:
    alone = logprobs[lengths == 1]
    return int((torch.nan_to_num(alone).abs() > 1e-4).sum())
