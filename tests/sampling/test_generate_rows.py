"""Rows of a generation are those of one plain forward over prompt and output, however its steps were made."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import DeviceHiddenStates, RowBuffer, RowLayout
from hiddentap.capture.sampling import Aborts, SamplingParams, generate_with_capture
from hiddentap.capture.sampling.generation.cached_model import cached_model
from hiddentap.capture.sampling.generation.prompt_lookup import PromptLookup
from hiddentap.capture.sampling.kv_cache.held_positions import HeldPositions
from hiddentap.models.layer_choice import LayerChoice
from support.architectures import build, livened
from support.fake_requests import FakeBatch, FakeRequest
from support.generation import (
    FOUR,
    LAYER_IDS,
    PROMPTS,
    CountedCalls,
    PlainForward,
    assert_rows_of_a_plain_forward,
    greedy,
    lively,
    require_lookup,
    row_error,
)

COUNT = 14
GREEDY = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True)
SEEDED = SamplingParams(seed=5, temperature=1.5, max_new_tokens=COUNT, ignore_eos=True)


def run(family: str, prompts: Sequence[Any] = PROMPTS, params: Any = SEEDED, **options: Any) -> list[Any]:
    return generate_with_capture(lively(family), prompts, params, layer_ids=LAYER_IDS, **options)


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize("options", [{"prefill_chunk": 3}, {"max_batch": 2}], ids=str)
def test_rows_of_ragged_batches(family: str, options: dict[str, Any]) -> None:
    for result in run(family, **options):
        assert len(result.token_ids) == COUNT
        assert_rows_of_a_plain_forward(lively(family), result)


def test_rows_of_ragged_batches_of_a_model_that_scales_attention_by_the_column() -> None:
    model = livened(build("llama4_text", floor_scale=16, no_rope_layers=[0] * 4))
    for result in generate_with_capture(model, PROMPTS, GREEDY, layer_ids=LAYER_IDS):
        assert_rows_of_a_plain_forward(model, result)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_rows_with_prompt_lookup_and_chunks(family: str) -> None:
    require_lookup(family)
    for result in run(family, prompt_lookup=3, prefill_chunk=5, params=GREEDY):
        assert_rows_of_a_plain_forward(lively(family), result)


class Oracle:
    """Guesses the true continuation, but for every third token, which is wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, family: str, prompt: list[int], wrong_every: int = 0) -> None:
        self.output = greedy(lively(family), prompt, 40)
        self._prompt, self._wrong_every = prompt, wrong_every
        monkeypatch.setattr(PromptLookup, "draft", lambda lookup, count: self._draft(lookup, count))

    def _draft(self, lookup: PromptLookup, count: int) -> list[int]:
        done = len(lookup._token_ids) - len(self._prompt)
        return [self._guess(place) for place in range(done, done + max(count, 0))]

    def _guess(self, place: int) -> int:
        wrong = self._wrong_every and place % self._wrong_every == self._wrong_every - 1
        return (self.output[place] + 1) % 80 if wrong else self.output[place]


def test_right_guesses_are_committed_at_once_and_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(monkeypatch, "llama", PROMPTS[0])
    with CountedCalls(lively("llama")) as calls:
        [result] = run("llama", [PROMPTS[0]], GREEDY, prompt_lookup=4)
    assert list(result.token_ids) == oracle.output[:COUNT]
    # One token from the prompt, five of each full step, the last three of a step that may guess two.
    assert calls.shapes[-4:] == [(1, 7), (1, 5), (1, 5), (1, 3)]
    assert_rows_of_a_plain_forward(lively("llama"), result)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_rows_of_wrong_guesses_are_dropped(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    require_lookup(family)
    oracle = Oracle(monkeypatch, family, PROMPTS[2], wrong_every=3)
    [result] = run(family, [PROMPTS[2]], GREEDY, prompt_lookup=5)
    assert list(result.token_ids) == oracle.output[:COUNT]
    assert_rows_of_a_plain_forward(lively(family), result)


def test_a_stop_in_the_middle_of_an_accepted_run_ends_the_request_there(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(monkeypatch, "llama", PROMPTS[0])
    # The step behind the prompt accepts tokens 1..5; the stop is the first new one among 2..4.
    at = next(place for place in (2, 3, 4) if oracle.output[place] not in oracle.output[:place])
    params = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True, stop_token_ids=[oracle.output[at]])
    with CountedCalls(lively("llama")) as calls:
        [result] = run("llama", [PROMPTS[0]], params, prompt_lookup=4)
    assert calls.shapes[-2:] == [(1, 7), (1, 5)]
    assert list(result.token_ids) == oracle.output[: at + 1]
    assert result.finish_reason == "stop_token"
    assert_rows_of_a_plain_forward(lively("llama"), result)


@pytest.mark.parametrize("most", [1, 2, 6])
@pytest.mark.parametrize("lookup", [0, 4])
def test_rows_at_most_new_tokens(monkeypatch: pytest.MonkeyPatch, most: int, lookup: int) -> None:
    oracle = Oracle(monkeypatch, "llama", PROMPTS[0])
    params = SamplingParams(temperature=0, max_new_tokens=most, ignore_eos=True)
    [result] = run("llama", [PROMPTS[0]], params, prompt_lookup=lookup)
    assert list(result.token_ids) == oracle.output[:most]
    assert result.finish_reason == "length"
    assert_rows_of_a_plain_forward(lively("llama"), result)


class AbortAfter:
    """A grammar that rules nothing out, and gives its request up when so many tokens were sampled."""

    def __init__(self, aborts: Aborts, index: int, tokens: int) -> None:
        self._aborts, self._index, self._left = aborts, index, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left < 0:
            self._aborts.abort(self._index)
        return scores


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("lookup", [0, 3])
def test_an_abort_keeps_what_was_committed_and_leaves_the_others_alone(tokens: int, lookup: int) -> None:
    aborts = Aborts()
    params = [SEEDED] * len(PROMPTS)
    plain = run("llama")
    params[2] = SamplingParams(
        seed=5, temperature=1.5, max_new_tokens=COUNT, ignore_eos=True, logits_processor=AbortAfter(aborts, 2, tokens)
    )
    results = run("llama", params=params, aborts=aborts, prompt_lookup=lookup)
    assert results[2].finish_reason == "abort"
    kept = results[2].token_ids
    assert kept == plain[2].token_ids[: len(kept)]
    assert len(kept) <= tokens
    if lookup == 0:
        assert len(kept) == tokens
    for result, before in zip(results, plain, strict=True):
        if result.index != 2:
            assert result.token_ids == before.token_ids
        if result.token_ids:
            assert_rows_of_a_plain_forward(lively("llama"), result)
    if not kept:
        assert results[2].rows == {}


def test_a_request_that_is_aborted_before_it_runs_takes_part_in_no_forward() -> None:
    aborts = Aborts()
    for index in (0, 3):
        aborts.abort(index)
    with CountedCalls(lively("llama")) as calls:
        results = run("llama", aborts=aborts)
    assert [result.finish_reason for result in results] == ["abort", "length", "length", "abort", "length", "length"]
    assert (2, 7) not in calls.shapes
    assert results[0].token_ids == ()


def test_requests_enter_as_others_end_and_keep_their_rows() -> None:
    params = [SamplingParams(seed=1, max_new_tokens=count, ignore_eos=True) for count in (3, 14, 6, 2, 9, 5)]
    results = run("llama", params=params, max_batch=2)
    assert [len(result.token_ids) for result in results] == [3, 14, 6, 2, 9, 5]
    for result in results:
        assert_rows_of_a_plain_forward(lively("llama"), result)


def test_states_before_and_behind_the_final_norm_share_the_rows() -> None:
    model = lively("llama")
    for result in generate_with_capture(
        model, PROMPTS[:3], SEEDED, layer_ids=[0, 4], convention="boundary", final="both"
    ):
        with torch.no_grad():
            states = model(input_ids=result.input_ids[None].long(), output_hidden_states=True).hidden_states
        last = PlainForward(model, result.input_ids.tolist()).outputs[-1]
        assert row_error(result.aux_hidden_states[:, 0], states[0][0]) < 1e-5
        assert row_error(result.aux_hidden_states[:, 1], last) < 1e-5
        assert row_error(result.rows["pre_norm"], last) < 1e-5
        assert row_error(result.rows["post_norm"], states[-1][0]) < 1e-5


def test_a_prompt_in_one_pass_and_in_chunks_then_three_tokens() -> None:
    prompt = PROMPTS[5][:10]
    params = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    tokens = greedy(lively("llama"), prompt, 3)
    with CountedCalls(lively("llama")) as calls:
        [whole] = run("llama", [prompt], params)
        [chunked] = run("llama", [prompt], params, prefill_chunk=4)
    assert calls.shapes[-5:] == [(1, 4), (1, 4), (1, 2), (1, 1), (1, 1)]
    for result in (whole, chunked):
        assert result.input_ids.tolist() == [*prompt, *tokens[:2]]
        assert result.output_ids.tolist() == [-1] * 9 + tokens
        assert result.aux_hidden_states.shape[0] == 12
    assert torch.allclose(whole.aux_hidden_states, chunked.aux_hidden_states, atol=1e-5)


def test_a_chunk_that_is_missing_is_an_error_that_names_its_rows_and_never_zeros() -> None:
    model = cached_model(lively("llama"), LayerChoice(LAYER_IDS))
    ids = torch.tensor([PROMPTS[5][:10]])
    with model.attached():
        held = HeldPositions.nothing(model.new_cache(), 1)
        model.step(ids[:, :4], held, 1)  # as a cache of prefixes would have it: filled, and not captured
        columns = model.step(ids[:, 4:], held.grown(4), 1).columns
    host = DeviceHiddenStates(columns, RowLayout.of_prompts([6], [4])).copy_to_host(torch.clone)
    request = FakeRequest(rows=RowBuffer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rows 0\.\.3 of 'aux_hidden_states' are missing"):
        host.consume(FakeBatch([request]), [None])
    assert request.rows.columns() == {}
