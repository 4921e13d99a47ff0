"""What generation recorded beside the hidden states: sampling supports and log-probabilities."""

from dataclasses import dataclass
from typing import Any

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
    """Takes chunks one after the other."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("supports", "of_model", "of_sampler", "top_differences")
        }
        self._sure_misses = 0

    def add(self, chunk: Chunk) -> None:
        """Look at the rows of a chunk; nothing happens for shards of an offline capture."""
        columns = chunk.columns
        of_sampler, of_model = columns.get("sampling_logprobs"), columns.get("logprobs")
        if "sampling_mask_lengths" in columns:
            lengths = columns["sampling_mask_lengths"]
            self._parts["supports"].append(lengths[lengths >= 0].long().numpy())
            if of_sampler is not None:
                self._sure_misses += _sure_misses(lengths, of_sampler)
        if of_sampler is not None and of_model is not None:
            both = of_sampler.isfinite() & of_model.isfinite()
            self._parts["of_model"].append(of_model[both].numpy())
            self._parts["of_sampler"].append(of_sampler[both].numpy())
        if of_model is not None and {"output_ids", "topk_ids"} <= columns.keys():
            self._parts["top_differences"].append(top_differences(columns).numpy())

    def profile(self) -> SampledProfile | None:
        """What was found; None where nothing was recorded."""
        if not any(self._parts.values()):
            return None
        return SampledProfile(
            self._joined("supports", np.int64),
            self._joined("of_model", np.float32),
            self._joined("of_sampler", np.float32),
            self._joined("top_differences", np.float32),
            self._sure_misses,
        )

    def _joined(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        parts = self._parts[name]
        return np.concatenate(parts) if parts else np.empty(0, dtype)


def top_differences(columns: dict[str, Tensor]) -> Tensor:
    """(d,) |logprobs - (topk_logits - topk_logsumexp)| of rows whose sampled token is among their k stored ones."""
    wanted = columns["output_ids"]
    hits = (columns["topk_ids"] == wanted[:, None]) & (wanted[:, None] >= 0)
    rows, slots = hits.nonzero(as_tuple=True)
    from_top = columns["topk_logits"][rows, slots] - columns["topk_logsumexp"][rows]
    differences = (columns["logprobs"][rows] - from_top).abs()
    return differences[differences.isfinite()]


def _sure_misses(lengths: Tensor, logprobs: Tensor) -> int:
    alone = logprobs[lengths == 1]
    return int((torch.nan_to_num(alone).abs() > 1e-4).sum())
