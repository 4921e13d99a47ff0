"""The drafter's loss: each drafted token, and the target's own state that it comes from; nearer ones count more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .blocks import IGNORED


@dataclass(frozen=True)
class DraftLoss:
    """A step's loss, and how often the drafted token was the right one.

    Attributes:
        value: scalar, what is minimised.
        cross_entropy: scalar, the part of it that speaks of tokens.
        right: (B - 1,) the share of right tokens at each distance, on the softmax's own ids.
    """

    value: Tensor
    cross_entropy: Tensor
    right: Tensor


def draft_loss(
    states: Tensor,
    lm_head: Tensor,
    labels: Tensor,
    decay: float,
    *,
    ids: Tensor | None = None,
    goals: Tensor | None = None,
    goal_weight: float = 0.0,
) -> DraftLoss:
    """Loss of (A, B - 1, H) states against (A, B - 1) labels; a token d places behind the anchor weighs decay ** (d - 1).

    Later tokens are of use only where all earlier ones were accepted.

    lm_head: (V, H), in the dtype that logits are computed in.
    ids: ascending token ids that the softmax runs over, all labels among them; None: the whole vocabulary.
    goals: (A, B - 1, H), the target's post-norm states that the labels came from. `goal_weight` times the states' mean square
        distance to them, in shares of their own mean square, joins the cross-entropy: H numbers to learn from, not one.
    """
    counted = labels != IGNORED
    weights = decay ** torch.arange(labels.shape[1]) * counted
    weights = weights / weights.sum()
    if ids is not None:
        lm_head, labels = lm_head[ids], torch.where(counted, torch.searchsorted(ids, labels), IGNORED)
    logits = functional.linear(states.to(lm_head.dtype), lm_head).float()
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    cross_entropy = (each.view_as(labels) * weights).sum()
    right = ((logits.argmax(-1) == labels) & counted).sum(0) / counted.sum(0).clamp(min=1)
    value = cross_entropy
    if goals is not None:
        distance = (states.float() - goals).square().mean(-1) / goals[counted].square().mean()
        value = value + goal_weight * (distance * weights).sum()
    return DraftLoss(value, cross_entropy, right)


def softmax_ids(occurring: Tensor, count: int, vocabulary: int, generator: torch.Generator) -> Tensor | None:
    """The ids that occur, ascending, filled up to `count` with others drawn at random; None where that is every id.

    The others keep tokens down that no training text holds and that would otherwise never be told apart.
    """
    if count == 0 or count >= vocabulary:
        return None
    chosen = torch.zeros(vocabulary, dtype=torch.bool)
    chosen[occurring] = True
    missing = max(count - int(chosen.sum()), 0)
    others = torch.nonzero(~chosen)[:, 0]
    chosen[others[torch.randint(len(others), (missing,), generator=generator)]] = True
    return torch.nonzero(chosen)[:, 0]
