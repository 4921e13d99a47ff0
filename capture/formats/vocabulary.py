"""The draft vocabulary: which target tokens a drafter with fewer outputs can say.

V: target vocabulary, D: draft vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import LayoutError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The D target tokens that a drafter can say.

    Attributes:
        token_ids: (D,) int64, the target token of each draft id; ascending unless an existing draft model has another order.
        V: how many tokens the target has.
    """

    token_ids: Tensor
    V: int

    @property
    def D(self) -> int:
        return len(self.token_ids)

    @property
    def d2t(self) -> Tensor:
        """Return (D,) int64: what to add to a draft id to get the target's."""
        return self.token_ids - torch.arange(self.D)

    @property
    def t2d(self) -> Tensor:
        """Return (V,) bool: which target tokens are in the draft vocabulary."""
        mask = torch.zeros(self.V, dtype=torch.bool)
        mask[self.token_ids] = True
        return mask

    @property
    def sha256(self) -> str:
        """Return a hash of V and of the target token of each draft id."""
        return hashlib.sha256(f"{self.V} {self.token_ids.tolist()}".encode()).hexdigest()


def require_within(counts: NDArray[np.int64], V: int) -> NDArray[np.int64]:
    """Return `counts`, of tokens that are all among V; raises LayoutError naming one that is not."""
    if len(counts) > V:
        raise LayoutError(
            f"token id {len(counts) - 1} is supervised and the vocabulary has {V} tokens; is it another model's?"
        )
    return counts


def draft_vocabulary(counts: NDArray[np.int64], V: int, D: int | None) -> DraftVocabulary:
    """Return the D most frequent supervised tokens, lower ids first among equals, then the lowest unused ids; all V for None.

    counts: (<= V,) int64, how often each token is supervised. D <= V.

    Raises:
        LayoutError: a token outside the vocabulary was counted, so the head or the size is of another model.
    """
    require_within(counts, V)
    if D is None or D == V:
        return DraftVocabulary(torch.arange(V), V)
    padded = np.zeros(V, np.int64)
    padded[: len(counts)] = counts
    frequent = np.argsort(-padded, kind="stable")[:D]
    return DraftVocabulary(torch.from_numpy(np.sort(frequent)), V)
