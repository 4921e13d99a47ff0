"""A small student of the captured model, and what it learns from a pack: next-token distributions and hidden states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

SMALLEST = 1e-6


class Student(nn.Module):
    """A Llama over the target's vocabulary, with one projection to the target's width for each captured layer.

    The captured layers, from low to high, are learnt by the student's layers, spread evenly; the projections are of no use
    after training.
    """

    def __init__(self, config: LlamaConfig, taps: int, target_width: int) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)
        self.layers = [round((tap + 1) * config.num_hidden_layers / (taps + 1)) for tap in range(taps)]
        self.projections = nn.ModuleList(nn.Linear(config.hidden_size, target_width) for _ in range(taps))

    def forward(self, pack: dict[str, Any], rows: Tensor) -> tuple[Tensor, Tensor]:
        """(len(rows), V) logits of those rows and (T, K, H) projected states of all; each sample of the pack by itself."""
        output = self.model.model(
            pack["input_ids"][None],
            attention_mask=own_past(pack["segment_ids"]),
            position_ids=pack["position_ids"][None],
            output_hidden_states=True,
            use_cache=False,
        )
        states = [
            project(output.hidden_states[layer][0])
            for project, layer in zip(self.projections, self.layers, strict=True)
        ]
        return self.model.lm_head(output.last_hidden_state[0, rows]), torch.stack(states, 1)


def student_config(target: Any, hidden_size: int, layers: int) -> LlamaConfig:
    """A config of heads 32 wide over the vocabulary of `target`, its text config."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        max_position_embeddings=target.max_position_embeddings,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        tie_word_embeddings=True,
    )


def own_past(segment_ids: Tensor) -> Tensor:
    """(1, 1, T, T) float32, 0 where a row sees another of its own sample that is not after it, else the lowest number."""
    rows = torch.arange(len(segment_ids))
    sees = (segment_ids[:, None] == segment_ids) & (rows[:, None] >= rows)
    return torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]


def answered_rows(pack: dict[str, Any]) -> Tensor:
    """The rows before a supervised token of their own sample."""
    segments = pack["segment_ids"]
    return torch.nonzero((segments[:-1] == segments[1:]) & pack["loss_mask"][1:].bool())[:, 0]


def top_k_divergence(logits: Tensor, top: dict[str, Tensor]) -> Tensor:
    """Mean Kullback-Leibler divergence of (T, V) student logits from the target's stored k largest logits.

    Over k + 1 outcomes: the k stored ids, and all others as one, whose share is known from the stored log-sum-exp.

    top: topk_logits (T, k), topk_ids (T, k), topk_logsumexp (T,); places behind a cut by top-p hold NaN and -1, and add nothing.
    """
    empty = top["topk_ids"] < 0
    theirs = top["topk_logits"] - top["topk_logsumexp"][:, None]
    ours = logits.float().log_softmax(-1).gather(1, top["topk_ids"].long().clamp(min=0))
    theirs, ours = (logprobs.masked_fill(empty, math.log(SMALLEST)) for logprobs in (theirs, ours))
    theirs, ours = with_tail(theirs), with_tail(ours)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean()


def with_tail(logprobs: Tensor) -> Tensor:
    """(T, k) log-probabilities to (T, k + 1): what they leave to one, as the last."""
    tail = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST).log()
    return torch.cat([logprobs, tail], -1)


def state_distance(states: Tensor, pack: dict[str, Any], scale: Tensor) -> Tensor:
    """Mean square distance of (T, K, H) projected states to the captured ones, of which each is brought to unit size.

    First rows are left out: their states are hundreds of times larger, the same for every text.

    scale: (K * H,), the median size of each channel.
    """
    captured = pack["aux_hidden_states"].float()
    goals = functional.rms_norm(captured / scale.view(captured.shape[1:]), captured.shape[-1:])
    inside = pack["position_ids"] > 0
    return (states.float() - goals)[inside].square().mean()
