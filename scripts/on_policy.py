#!/usr/bin/env python3
"""A small on-policy loop: sample with recorded supports, replay them in the trainer, take a gradient step.

    python scripts/on_policy.py --model ~/.cache/hiddentap/smollm2-135m-instruct --steps 5

Answers are sampled with top-k and top-p, so each token comes from a cut and renormalized distribution. The trainer restores that
distribution from the recorded support: its log-probabilities equal those of the sampler, and the ratio of the two starts at 1.
Normalizing over the whole vocabulary instead would begin with ratios off by what was cut; the script prints both. The reward is a
toy: how much of an answer is the letter "e".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hiddentap import GenerationResult, SamplingParams, generate_with_capture, masked_log_softmax

PROMPTS = ("Describe the sea.", "What do bees do?", "Name a tree and say why you like it.")


@dataclass(frozen=True)
class Rollout:
    """An answer and how much better than its group it was."""

    result: GenerationResult
    advantage: float


@click.command()
@click.option("--model", required=True, metavar="M", help="Folder or hub id of a chat model.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Rollouts and updates.")
@click.option("--group", type=click.IntRange(2), default=4, show_default=True, help="Answers to each prompt.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=24, show_default=True)
@click.option("--learning-rate", type=float, default=2e-5, show_default=True)
def main(model: str, steps: int, group: int, max_new_tokens: int, learning_rate: float) -> None:
    """Train M for a few steps on its own answers."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        max_new_tokens=max_new_tokens,
        return_sampling_mask=True,
        return_logprob=True,
    )
    for step in range(steps):
        rollouts, reward = sampled(policy, tokenizer, params, group, first_seed=1000 * step)
        optimizer.zero_grad()
        gaps = []
        for rollout in rollouts:
            loss, gap = policy_loss(policy, rollout, params.temperature)
            (loss / len(rollouts)).backward()
            gaps.append(gap)
        optimizer.step()
        replayed, plain = (max(column) for column in zip(*gaps, strict=True))
        print(
            f"step {step}: reward {reward:.3f}; log-ratio before the update: replayed {replayed:.1e}, full vocabulary {plain:.1e}"
        )


def sampled(
    policy: Any, tokenizer: Any, params: SamplingParams, group: int, first_seed: int
) -> tuple[list[Rollout], float]:
    """`group` answers to each prompt, with their advantages, and the mean reward."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS for _ in range(group)]
    each = [replace(params, seed=first_seed + place) for place in range(len(conversations))]
    # No layer is captured here; with ids, the hidden states of the same forwards come in the same rows.
    results = generate_with_capture(policy, conversations, each, layer_ids=[], tokenizer=tokenizer)
    rewards = torch.tensor([reward_of(result.text or "") for result in results]).view(-1, group)
    spread = rewards.std(dim=1, keepdim=True) + 1e-3
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten().tolist()
    return [Rollout(*pair) for pair in zip(results, advantages, strict=True)], float(rewards.mean())


def reward_of(text: str) -> float:
    """The share of the letter e."""
    return text.lower().count("e") / max(len(text), 1)


def policy_loss(policy: Any, rollout: Rollout, temperature: float) -> tuple[Tensor, tuple[float, float]]:
    """The loss of one answer, and how far replayed and full-vocabulary log-probabilities are from the sampler's."""
    rows, mask = rollout.result.rows, rollout.result.sampling_mask
    logits = policy(input_ids=rows["input_ids"][None].long()).logits[0] / temperature
    written = rows["output_ids"] >= 0
    tokens = rows["output_ids"][written].long()[:, None]
    replayed = masked_log_softmax(logits, mask)[written].gather(-1, tokens).squeeze(-1)
    recorded = rows["sampling_logprobs"][written]
    full = logits[written].log_softmax(-1).gather(-1, tokens).squeeze(-1).detach()
    ratio = (replayed - recorded).exp()
    loss = -(ratio * rollout.advantage).mean()
    return loss, (float((replayed.detach() - recorded).abs().max()), float((full - recorded).abs().max()))


if __name__ == "__main__":
    main()
