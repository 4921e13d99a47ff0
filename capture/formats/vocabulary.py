"""The draft vocabulary: which target tokens a drafter with fewer outputs can say.

V: target vocabulary, D: draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import LayoutError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The D target tokens that a drafter can say, ascending.

    Attributes:
        token_ids: (D,) int64.
        V: how many tokens the target has.
    """

    token_ids: Tensor
    V: int

    @property
    def D(self) -> int:
        return len(self.token_ids)

    @property
    def d2t(self) -> Tensor:
        """(D,) int64: what to add to a draft id to get the target's."""
        return self.token_ids - torch.arange(self.D)

    @property
    def t2d(self) -> Tensor:
        """(V,) bool: whether the drafter can say a target token."""
        mask = torch.zeros(self.V, dtype=torch.bool)
        mask[self.token_ids] = True
        return mask


def draft_vocabulary(counts: NDArray[np.int64], V: int, D: int | None) -> DraftVocabulary:
    """The D most frequent supervised tokens, the lower id first among equals, and then the lowest unused ids; all V for None.

    counts: (<= V,) int64, how often each token is supervised. D <= V.

    Raises:
        LayoutError: a token outside the vocabulary was counted, so the head or the size is of another model.
    """
    if len(counts) > V:
        raise LayoutError(
            f"token id {len(counts) - 1} is supervised and the vocabulary has {V} tokens; is it another model's?"
        )
    if D is None or D == V:
        return DraftVocabulary(torch.arange(V), V)
    padded = np.zeros(V, np.int64)
    padded[: len(counts)] = counts
    frequent = np.argsort(-padded, kind="stable")[:D]
    return DraftVocabulary(torch.from_numpy(np.sort(frequent)), V)
