"""The target's distribution of the next token at each position, over a draft vocabulary.

V: target vocabulary, D: draft vocabulary, T: rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import FormatError
from .vocabulary import DraftVocabulary

# (T, V) float32 of 128 K tokens is 64 MB.
ROWS = 128


@dataclass(frozen=True)
class Teacher:
    """The target's lm_head on post-norm rows.

    Attributes:
        lm_head: (..., H) to (..., V). dtype: how the model computed.
    """

    lm_head: nn.Module
    dtype: torch.dtype

    @torch.no_grad()
    def chunks(self, post_norm: Tensor, vocabulary: DraftVocabulary) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the teacher's view of (S, H) rows, up to `ROWS` rows at a time and in order.

        That is (T, D) float32 probabilities over the draft vocabulary, and (T,) bool: whether the most likely of all V tokens
        is in it.

        Raises:
            FormatError: lm_head has fewer outputs than the vocabulary has tokens.
        """
        sayable = vocabulary.t2d
        for first in range(0, len(post_norm), ROWS):
            rows = post_norm[first : first + ROWS]
            logits = self.lm_head(rows.to(self.dtype))
            if logits.shape[-1] < vocabulary.V:
                raise FormatError(f"lm_head gives {logits.shape[-1]} logits for a vocabulary of {vocabulary.V} tokens.")
            logits = logits[:, : vocabulary.V]
            probabilities = torch.softmax(logits[:, vocabulary.token_ids].float(), -1)
            yield probabilities, sayable[logits.argmax(-1)]


def most_likely(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of (T, D): values (T, k) that add up to 1, and their places (T, k) int32."""
    values, places = probabilities.topk(k, dim=-1)
    return values / values.sum(-1, keepdim=True), places.to(torch.int32)
