"""How many tokens a target takes from a drafter per step, counted while transformers generates."""

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
        steps: forwards of the target after the prefill; without a drafter there would be one per token.
        equal: prompts whose output was that of plain greedy decoding.
        prompts: all prompts.
    """

    tokens: int = 0
    steps: int = 0
    equal: int = 0
    prompts: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.equal + other.equal,
            self.prompts + other.prompts,
        )

    @property
    def length(self) -> float:
        """Mean tokens per step, the target's own token included: 1.0 where no drafted token is ever taken."""
        return self.tokens / self.steps if self.steps else float("nan")


def plain_greedy(model: Any, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """(1, P) prompt to (1, P + G), one token a step."""
    output: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output


def accepted(model: Any, drafter: Any, prompt: Tensor, plain: Tensor, max_new_tokens: int) -> Acceptance:
    """What one prompt, (1, P), counts with `drafter`; `plain` is what plain greedy decoding gave."""
    with counted_forwards(model) as forwards:
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
        steps=len(forwards) - 1,
        equal=int(torch.equal(output, plain)),
        prompts=1,
    )


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[None]]:
    """A list that grows by one entry with each forward of `model`."""
    forwards: list[None] = []
    handle = model.register_forward_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        handle.remove()
