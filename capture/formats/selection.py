"""The captured samples that a trainer can use, with the supervised count of each token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RunError
from ..progress import Done, Progress, Work
from .captured import CapturedFolder


@dataclass(frozen=True)
class Rule:
    """Requirements on a sample.

    Attributes:
        least: supervised tokens, at least.
        consecutive: whether two supervised tokens must stand side by side (block drafters anchor on such pairs).
        max_length: longer samples are cut to it first; None keeps them whole.
    """

    least: int = 1
    consecutive: bool = False
    max_length: int | None = None

    def fault(self, loss_mask: NDArray[np.uint8]) -> str | None:
        """Return why a sample with this mask (S,) is left out; None if it is kept."""
        if int(loss_mask.sum()) < self.least:
            return f"fewer than {self.least} supervised tokens"
        if self.consecutive and not bool((loss_mask[1:] & loss_mask[:-1]).any()):
            return "no two consecutive supervised tokens"
        return None


@dataclass(frozen=True, eq=False)
class Selection:
    """The N exported samples, numbered 0..N-1 in input order.

    Attributes:
        indices: (N,) int64 into the capture; lengths: (N,) int64 rows of each, after cutting.
        token_counts: (largest id + 1,) int64, how often each token is supervised in them.
        left_out: samples that are not exported, by reason. truncated: samples that were cut.
    """

    indices: NDArray[np.int64]
    lengths: NDArray[np.int64]
    token_counts: NDArray[np.int64]
    left_out: dict[str, int]
    truncated: int

    def __len__(self) -> int:
        return len(self.indices)


def select(captured: CapturedFolder, rule: Rule, progress: Progress) -> Selection:
    """Read every sample's ids and mask once and apply `rule`.

    Raises:
        RunError: no sample is left.
    """
    progress.started(Work("reading masks", len(captured)))
    chosen: list[int] = []
    left_out: Counter[str] = Counter()
    counts = np.zeros(0, np.int64)
    for i in range(len(captured)):
        mask = captured.loss_mask(i).numpy()[: rule.max_length]
        fault = rule.fault(mask)
        if fault is None:
            chosen.append(i)
            counts = _added(counts, captured.input_ids(i).numpy()[: rule.max_length][mask != 0])
        else:
            left_out[fault] += 1
        progress.advanced(Done(1, len(mask)))
    if not chosen:
        raise RunError(f"none of the {len(captured)} samples can be exported: {_listed(left_out)}.")
    indices = np.array(chosen, np.int64)
    whole = captured.lengths[indices]
    lengths = whole if rule.max_length is None else np.minimum(whole, rule.max_length)
    return Selection(indices, lengths, counts, dict(left_out), int((lengths < whole).sum()))


def _added(counts: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
    found = np.bincount(token_ids, minlength=len(counts))
    found[: len(counts)] += counts
    return found.astype(np.int64)


def _listed(left_out: Counter[str]) -> str:
    return ", ".join(f"{count} have {reason}" for reason, count in left_out.most_common())
