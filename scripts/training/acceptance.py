"""Acceptance length and acceptance rate of a draft model, counted while transformers generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Counts over prompts.

    Attributes:
        tokens: new tokens, without the first of each prompt, which the prefill gives before anything is drafted.
        steps: forwards of the target after the prefill; without a draft model there would be one per token.
        equal: prompts whose output was that of plain greedy decoding.
        prompts: all prompts.
        proposed: draft tokens that the target checked.
    """

    tokens: int = 0
    steps: int = 0
    equal: int = 0
    prompts: int = 0
    proposed: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.equal + other.equal,
            self.prompts + other.prompts,
            self.proposed + other.proposed,
        )

    @property
    def length(self) -> float:
        """Return the mean acceptance length: tokens per step, the target's own token included (1.0: no draft token accepted)."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def taken(self) -> int:
        """Return the number of accepted draft tokens: all but the target's own token of each step."""
        return self.tokens - self.steps

    @property
    def rate(self) -> float:
        """Return the acceptance rate: accepted draft tokens / proposed ones."""
        return self.taken / self.proposed if self.proposed else float("nan")


def plain_greedy(model: Any, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """Return (1, P + G) ids for a (1, P) prompt, decoded one token per step."""
    output: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output


def accepted(model: Any, drafter: Any, prompt: Tensor, plain: Tensor, max_new_tokens: int) -> Acceptance:
    """Return the counts of one prompt, (1, P), with `drafter`; `plain` is the output of plain greedy decoding."""
    with counted_positions(model) as positions:
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            assistant_model=drafter,
            speculation_type="dflash",
        )
    return Acceptance(
        tokens=output.shape[1] - prompt.shape[1] - 1,
        steps=len(positions) - 1,
        equal=int(torch.equal(output, plain)),
        prompts=1,
        proposed=sum(count - 1 for count in positions[1:]),  # a step runs the last token and its draft
    )


@contextmanager
def counted_positions(model: Any) -> Iterator[list[int]]:
    """Yield a list to which each forward of `model` appends the number of positions of its input ids."""
    positions: list[int] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        positions.append(ids.shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield positions
    finally:
        handle.remove()
