"""Counting of tokens and steps, on a model that decodes as it is told."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.acceptance import Acceptance, accepted
from training.serving import shifted, untrained
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel


class Told(nn.Module):
    """Gives `new` tokens in forwards of that many `positions`, of which the first is the prefill."""

    def __init__(self, new: list[int], *positions: int) -> None:
        super().__init__()
        self.new, self.positions = new, positions

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids

    def generate(self, prompt: Tensor, **settings: Any) -> Tensor:
        assert settings["speculation_type"] == "dflash"
        assert settings["do_sample"] is False
        for count in self.positions:
            self(input_ids=torch.zeros(1, count, dtype=torch.long))
        return torch.cat([prompt, torch.tensor([self.new])], 1)


def test_the_prefill_and_its_token_are_not_counted() -> None:
    prompt = torch.tensor([[5, 6]])
    counts = accepted(
        Told([1, 2, 3, 4, 5, 6, 7], 2, 4, 4, 2), None, prompt, torch.tensor([[5, 6, 1, 2, 3, 4, 5, 6, 7]]), 7
    )
    assert counts == Acceptance(tokens=6, steps=3, equal=1, prompts=1, proposed=7)
    assert counts.length == 2.0


def test_the_acceptance_rate_is_accepted_draft_tokens_by_proposed_ones() -> None:
    """Steps that check 3, 3 and 1 draft tokens give 6 tokens: one of each is the target's own, so 3 of 7 were accepted."""
    counts = accepted(Told([1, 2, 3, 4, 5, 6, 7], 2, 4, 4, 2), None, torch.tensor([[5, 6]]), torch.tensor([[5, 6]]), 7)
    assert (counts.taken, counts.proposed) == (3, 7)
    assert counts.rate == pytest.approx(3 / 7)


def test_without_a_proposal_there_is_no_acceptance_rate() -> None:
    counts = accepted(Told([1, 2], 5, 1), None, torch.tensor([[5]]), torch.tensor([[5, 1, 2]]), 2)
    assert (counts.length, counts.proposed, math.isnan(counts.rate)) == (1.0, 0, True)


def test_an_output_unlike_plain_greedy_is_not_counted_as_equal() -> None:
    counts = accepted(Told([1, 2], 1, 2), None, torch.tensor([[5]]), torch.tensor([[5, 1, 3]]), 2)
    assert (counts.equal, counts.prompts) == (0, 1)


def test_counts_of_prompts_add_up_before_they_are_divided() -> None:
    assert (Acceptance(6, 3, 1, 1) + Acceptance(1, 1, 0, 1)) == Acceptance(7, 4, 1, 2)
    assert (Acceptance(6, 3, 1, 1) + Acceptance(1, 1, 0, 1)).length == pytest.approx(1.75)
    assert (Acceptance(6, 3, 1, 1, 7) + Acceptance(1, 1, 0, 1, 3)).rate == pytest.approx(0.3)


def test_a_drafter_is_served_shifted_or_untrained_without_changing_it() -> None:
    config = MuseGlimmerAssistantConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        layer_types=["full_attention"], block_size=3, mask_token_id=1, target_layer_ids=[1, 4], pad_token_id=0,
    )  # fmt: skip
    drafter = MuseGlimmerAssistantModel(config)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    other, floor = shifted(drafter, -1), untrained(drafter, seed=3)
    assert other.config.target_layer_ids == [0, 3]
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert not torch.equal(floor.layers[0].mlp.up_proj.weight, before["layers.0.mlp.up_proj.weight"])
    assert drafter.config.target_layer_ids == [1, 4]
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
