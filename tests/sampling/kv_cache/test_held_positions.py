"""Requests of different lengths in one cache, against plain forwards of each alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.sampling.generation.cached_model import cached_model
from hiddentap.capture.sampling.kv_cache.held_positions import (
    HeldPositions,
    can_line_up,
    kept,
    lined_up,
    of_equal_length,
)
from support.architectures import token_ids
from support.cached_steps import empty_cache, model_of, plain

LINED_UP = [
    "llama", "gemma2", "gpt_oss", "gemma4_text", "qwen3_next", "kimi_linear", "mamba2", "lfm2_moe", "falcon_h1",
    "inkling_text",
]  # fmt: skip
CAN_GO_BACK = ["llama", "gemma2", "gpt_oss", "gemma4_text", "lfm2_moe", "inkling_text"]
NOT_LINED_UP = ["deepseek_v32", "minimax_m3_vl_text", "deepseek_v4", "qwen4_exp_text"]
# Windows are 8 wide: some requests are inside theirs, some far beyond.
LENGTHS = (2, 5, 11, 17)
IDS = token_ids(4, 30)


class Steps:
    """The four requests, each prefilled alone, and one cache for all."""

    def __init__(self, name: str, recording: bool = False) -> None:
        self.name = name
        self.model = cached_model(model_of(name), None)
        parts = []
        with self.model.attached():
            for row, length in enumerate(LENGTHS):
                held = HeldPositions.nothing(self.model.new_cache(recording=recording), 1)
                self.model.step(IDS[row : row + 1, :length], held, 1)
                parts.append(held.grown(length))
        self.held, self.rows = lined_up(parts), [0, 1, 2, 3]

    def step(self, S: int) -> Tensor:
        """(B, S, V): the next S tokens of every request."""
        ids = torch.stack([IDS[row, n : n + S] for row, n in zip(self.rows, self.held.lengths, strict=True)])
        with self.model.attached():
            logits = self.model.step(ids, self.held, S).logits
        self.held = self.held.grown(S)
        return logits

    def expected(self) -> Tensor:
        """(B, V): after the last token of each, alone in a forward without a cache."""
        return torch.cat(
            [plain(self.name, IDS[row : row + 1, :n]) for row, n in zip(self.rows, self.held.lengths, strict=True)]
        )

    def keep(self, places: list[int], drops: list[int]) -> None:
        parts = kept(self.held, places, drops)
        self.rows = [self.rows[place] for chosen, _ in parts for place in chosen]
        self.held = lined_up([part for _, part in parts])


def close(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-5, error


@pytest.mark.parametrize("name", LINED_UP)
def test_requests_of_any_length_go_on_together_as_if_alone(name: str) -> None:
    steps = Steps(name)
    for _ in range(3):
        close(steps.step(1)[:, 0], steps.expected())


@pytest.mark.parametrize("name", LINED_UP)
def test_requests_leave_and_the_slots_that_only_they_needed_go_too(name: str) -> None:
    steps = Steps(name)
    steps.step(1)
    steps.keep([0, 2], [0, 0])
    assert steps.held.slots == 12
    close(steps.step(1)[:, 0], steps.expected())
    steps.keep([0], [0])
    assert (steps.held.slots, steps.held.is_ragged) == (4, False)
    close(steps.step(1)[:, 0], steps.expected())


@pytest.mark.parametrize("name", CAN_GO_BACK)
def test_requests_lose_different_numbers_of_positions_and_go_on_as_if_they_had_not_been(name: str) -> None:
    steps = Steps(name, recording=True)
    for drops in ([3, 0, 2, 1], [0, 3, 1, 2], [1, 1, 1, 1]):
        steps.step(4)
        steps.keep([0, 1, 2, 3], drops)
        logits = steps.step(2)
        close(logits[:, 1], steps.expected())
        steps.keep([0, 1, 2, 3], [0, 0, 0, 0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "kimi_linear"])
def test_lining_up_leaves_the_caches_it_was_given_as_they_were(name: str) -> None:
    model = cached_model(model_of(name), None)
    alone = HeldPositions.nothing(model.new_cache(), 1)
    other = HeldPositions.nothing(model.new_cache(), 1)
    with model.attached():
        model.step(IDS[:1, :4], alone, 1)
        model.step(IDS[1:2, :9], other, 1)
        both = lined_up([alone.grown(4), other.grown(9)])
        model.step(torch.stack([IDS[0, 4:5], IDS[1, 9:10]]), both, 1)
        found = model.step(IDS[:1, 4:5], alone.grown(4), 1).logits[:, 0]
    close(found, plain(name, IDS[:1, :5]))


def test_empty_slots_are_masked_and_positions_count_without_them() -> None:
    held = HeldPositions(empty_cache("llama"), (2, 4), 4)
    cpu = torch.device("cpu")
    assert held.attention_mask(2, cpu).tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert held.position_ids(2, cpu).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("name", [*LINED_UP, *NOT_LINED_UP])
def test_caches_with_layers_of_other_kinds_are_not_lined_up(name: str) -> None:
    assert can_line_up(empty_cache(name)) == (name in LINED_UP)


def test_a_layer_that_cannot_be_shifted_is_an_error() -> None:
    held = HeldPositions(empty_cache("deepseek_v32"), (1,), 1)
    with pytest.raises(RuntimeError, match="layer 0 of the cache, a DynamicIndexedLayer, cannot be shifted"):
        lined_up([held, held])


@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_requests_of_one_length_are_merged_where_they_cannot_be_lined_up(name: str) -> None:
    model: Any = cached_model(model_of(name), None)
    parts = []
    with model.attached():
        for row in (0, 1):
            held = HeldPositions.nothing(model.new_cache(), 1)
            model.step(IDS[row : row + 1, :6], held, 1)
            parts.append(held.grown(6))
        both = of_equal_length(parts)
        close(model.step(IDS[:2, 6:7], both, 1).logits[:, 0], plain(name, IDS[:2, :7]))
    assert both.slots == 6
