"""Greedy generation gives the tokens of transformers' own generate(), however its steps are made."""

import functools
from typing import Any

import pytest

from hiddentap.capture.sampling import SamplingParams, generate_with_capture
from support.generation import FOUR, LAYER_IDS, PROMPTS, CountedCalls, greedy, hooks_of, lively, require_lookup

COUNT = 18
GREEDY = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True)
CAN_CROP = [family for family in FOUR if family != "kimi_linear"]


class Expected(dict[str, list[list[int]]]):
    """The tokens of transformers' generate(), made for a family when a test first asks."""

    def __missing__(self, family: str) -> list[list[int]]:
        self[family] = [greedy(lively(family), prompt, COUNT) for prompt in PROMPTS]
        return self[family]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


def tokens(family: str, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    options = {"layer_ids": LAYER_IDS} | options
    return [list(one.token_ids) for one in generate_with_capture(lively(family), PROMPTS, params, **options)]


@pytest.mark.parametrize("family", FOUR)
def test_the_outputs_compared_here_are_no_single_token_over_and_over(expected: dict[str, Any], family: str) -> None:
    assert min(len(set(output)) for output in expected[family]) >= 5


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize("layer_ids", [LAYER_IDS, []], ids=["captured", "not captured"])
@pytest.mark.parametrize("max_batch", [1, 4, 16])
def test_tokens_equal_those_of_generate(
    expected: dict[str, Any], family: str, layer_ids: list[int], max_batch: int
) -> None:
    assert tokens(family, layer_ids=layer_ids, max_batch=max_batch) == expected[family]


@pytest.mark.parametrize("family", CAN_CROP)
@pytest.mark.parametrize("layer_ids", [LAYER_IDS, []], ids=["captured", "not captured"])
@pytest.mark.parametrize("max_batch", [1, 16])
def test_prompt_lookup_changes_no_token(
    expected: dict[str, Any], family: str, layer_ids: list[int], max_batch: int
) -> None:
    require_lookup(family)
    assert tokens(family, layer_ids=layer_ids, max_batch=max_batch, prompt_lookup=4) == expected[family]


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize("chunk", [1, 5])
def test_prompts_in_chunks_change_no_token(expected: dict[str, Any], family: str, chunk: int) -> None:
    assert tokens(family, prefill_chunk=chunk) == expected[family]


def test_generate_gives_the_same_after_a_captured_run(expected: dict[str, Any]) -> None:
    tokens("llama")
    assert greedy(lively("llama"), PROMPTS[0], COUNT) == expected["llama"][0]


def test_the_model_is_left_as_it_was() -> None:
    model = lively("llama")
    model.train()
    model.model.layers[1].eval()
    before, hooks = [module.training for module in model.modules()], hooks_of(model)
    try:
        tokens("llama")
        assert [module.training for module in model.modules()] == before
        assert hooks_of(model) == hooks
    finally:
        model.eval()


def test_prompts_of_equal_length_share_a_forward_and_requests_of_any_length_share_their_steps() -> None:
    with CountedCalls(lively("llama")) as calls:
        tokens("llama")
    steps = calls.shapes[-(COUNT - 1 + 5) :]
    assert sorted(steps[:5]) == [(1, 1), (1, 3), (1, 12), (1, 20), (2, 7)]
    assert steps[5:] == [(6, 1)] * (COUNT - 1)


SEEDED = SamplingParams(seed=5, temperature=1.5, top_k=30, max_new_tokens=COUNT, ignore_eos=True)


@functools.cache
def seeded(family: str) -> list[list[int]]:
    """What a family samples with a seed, in steps as they are by default."""
    return tokens(family, SEEDED)


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize(
    "options", [{"max_batch": 1}, {"prefill_chunk": 4}, {"prompt_lookup": 3}, {"layer_ids": []}], ids=str
)
def test_seeded_tokens_do_not_depend_on_how_steps_are_made(family: str, options: dict[str, Any]) -> None:
    if "prompt_lookup" in options and family not in CAN_CROP:
        pytest.skip("refused for this model, which another test shows")
    if "prompt_lookup" in options:
        require_lookup(family)
    expected = seeded(family)
    assert min(len(set(output)) for output in expected) >= 5
    assert tokens(family, SEEDED, **options) == expected


@pytest.mark.parametrize("lookup", [0, 3])
def test_seeded_tokens_do_not_change_when_observers_are_added(lookup: int) -> None:
    watched = SamplingParams(
        seed=5, temperature=1.5, top_k=30, max_new_tokens=COUNT, ignore_eos=True,
        return_sampling_mask=True, return_logprob=True, top_logits=7,
    )  # fmt: skip
    assert tokens("llama", watched, prompt_lookup=lookup) == seeded("llama")


@pytest.mark.parametrize("lookup", [0, 3])
def test_penalties_and_a_seed_give_the_same_tokens_with_and_without_guesses(lookup: int) -> None:
    params = SamplingParams(
        seed=2,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        max_new_tokens=COUNT,
        ignore_eos=True,
    )
    assert tokens("llama", params, prompt_lookup=lookup) == tokens("llama", params, max_batch=1)


def test_prompts_enter_once_a_quarter_of_the_batch_is_free() -> None:
    params = [SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True) for count in (2, 3, 9, *[9] * 9)]
    prompts = [[20 + place] * 5 for place in range(12)]
    with CountedCalls(lively("llama")) as calls:
        results = generate_with_capture(lively("llama"), prompts, params, layer_ids=[1], max_batch=8)
    start = calls.shapes.index((8, 5))
    # The first leaves after one step of eight, the second after one of seven: then two enter.
    assert calls.shapes[start : start + 5] == [(8, 5), (8, 1), (7, 1), (2, 5), (8, 1)]
    assert [len(result.token_ids) for result in results] == [2, 3, *[9] * 10]
