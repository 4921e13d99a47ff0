"""Blocks of a DFlash drafter at many anchors of one pack: what serving computes step by step, in one training forward.

A block begins with a known token, the anchor, followed by B - 1 mask tokens. It sees the target's states of the rows strictly
before its anchor, and itself in both directions. In serving there is one block at a time; here A of them stand side by side and
the mask keeps them apart. Letters: A anchors, B block size, T rows of the pack, K taps, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True)
class Blocks:
    """A blocks over a pack of T rows.

    Attributes:
        ids: (A, B) int64, anchor and mask tokens.
        labels: (A, B - 1) int64, the tokens behind the anchor; IGNORED outside the sample or where they are not supervised.
        sources: (A, B - 1) int64, the rows whose logits give the labels, each the row before its label's.
        position_ids: (1, T + A * B) int64, those of the pack's rows and then those of the blocks.
        mask: (1, 1, A * B, T + A * B) bool, what each place of a block sees.
    """

    ids: Tensor
    labels: Tensor
    sources: Tensor
    position_ids: Tensor
    mask: Tensor


def possible_anchors(pack: dict[str, Any]) -> Tensor:
    """The rows that have a row of their sample before them and a supervised token of it behind them."""
    segments, supervised = pack["segment_ids"], pack["loss_mask"].bool()
    followed = torch.zeros_like(supervised)
    followed[:-1] = (segments[:-1] == segments[1:]) & supervised[1:]
    return torch.nonzero(followed & (pack["position_ids"] > 0))[:, 0]


def sample_anchors(pack: dict[str, Any], per_sequence: int, generator: torch.Generator) -> Tensor:
    """At most `per_sequence` anchors of each sample of the pack, drawn without repetition, ascending."""
    possible = possible_anchors(pack)
    shuffled = possible[torch.randperm(len(possible), generator=generator)]
    owners = pack["segment_ids"][shuffled]
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=int(pack["segment_ids"][-1]) + 1)
    starts = torch.cumsum(counts, 0) - counts
    turn = torch.arange(len(order)) - starts[owners[order]]
    return shuffled[order[turn < per_sequence]].sort().values


def make_blocks(pack: dict[str, Any], anchors: Tensor, block_size: int, mask_token_id: int) -> Blocks:
    """The blocks of `anchors`, rows of the pack."""
    T, (A, B) = len(pack["input_ids"]), (len(anchors), block_size)
    ids = torch.full((A, B), mask_token_id)
    ids[:, 0] = pack["input_ids"][anchors]
    places = torch.arange(B)
    block_positions = pack["position_ids"][anchors][:, None] + places
    return Blocks(
        ids,
        _labels(pack, anchors, places[1:]),
        (anchors[:, None] + places[:-1]).clamp(max=T - 1),
        torch.cat([pack["position_ids"], block_positions.flatten()])[None],
        torch.cat([_sees_context(pack, anchors, B), _sees_block(A, B)], 1).view(1, 1, A * B, T + A * B),
    )


def block_states(drafter: Any, embeddings: nn.Module, context: Tensor, blocks: Blocks) -> Tensor:
    """(A, B - 1, H), what the drafter's lm_head input is at each mask token.

    context: (T, K * H), the target's states side by side, in the drafter's dtype.

    Raises ValueError for a drafter with sliding layers, whose windows the mask does not draw.
    """
    if set(drafter.config.layer_types) != {"full_attention"}:
        raise ValueError(f"a drafter with full_attention layers only is needed, got {drafter.config.layer_types}.")
    A, B = blocks.ids.shape
    output = drafter(
        noise_embeds=embeddings(blocks.ids.flatten())[None].to(context.dtype),
        context_hidden_states=context[None],
        position_ids=blocks.position_ids,
        attention_mask={"full_attention": blocks.mask},
    )
    states: Tensor = output.last_hidden_state
    return states.view(A, B, -1)[:, 1:]


def _labels(pack: dict[str, Any], anchors: Tensor, behind: Tensor) -> Tensor:
    rows = anchors[:, None] + behind
    inside = rows.clamp(max=len(pack["input_ids"]) - 1)
    same = (rows == inside) & (pack["segment_ids"][inside] == pack["segment_ids"][anchors][:, None])
    wanted = same & pack["loss_mask"][inside].bool()
    labels: Tensor = torch.where(wanted, pack["input_ids"][inside], IGNORED)
    return labels


def _sees_context(pack: dict[str, Any], anchors: Tensor, B: int) -> Tensor:
    """(A * B, T)"""
    rows, segments = torch.arange(len(pack["input_ids"])), pack["segment_ids"]
    sees: Tensor = (segments == segments[anchors][:, None]) & (rows < anchors[:, None])
    return sees.repeat_interleave(B, 0)


def _sees_block(A: int, B: int) -> Tensor:
    """(A * B, A * B)"""
    owner = torch.arange(A).repeat_interleave(B)
    return owner[:, None] == owner
