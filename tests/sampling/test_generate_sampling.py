"""What was sampled from a row stands in that row: supports, log-probabilities, top logits, against plain forwards."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import RaggedRows
from hiddentap.capture.sampling import SamplingParams, generate_with_capture, masked_log_softmax
from support.generation import LAYER_IDS, PROMPTS, PlainForward, lively

COUNT = 10
ASKED: dict[str, Any] = {"return_sampling_mask": True, "return_logprob": True, "top_logits": 5}
PARAMS = SamplingParams(seed=3, temperature=1.3, top_k=12, top_p=0.9, max_new_tokens=COUNT, ignore_eos=True, **ASKED)


def run(params: Any, **options: Any) -> list[Any]:
    return generate_with_capture(lively("llama"), PROMPTS, params, layer_ids=LAYER_IDS, **options)


def support_of(logits: Tensor, temperature: float, top_k: int, top_p: float) -> set[int]:
    """Sorted and added up by hand, on one row."""
    weights = sorted(((float(p), i) for i, p in enumerate((logits.double() / temperature).softmax(-1))), reverse=True)
    mass, count = 0.0, 0
    while mass < top_p:
        mass, count = mass + weights[count][0], count + 1
    return {i for _, i in weights[: min(count, top_k)]}


@pytest.mark.parametrize("options", [{}, {"prompt_lookup": 3}, {"max_batch": 2, "prefill_chunk": 4}], ids=str)
def test_every_row_replays_from_a_plain_forward(options: dict[str, Any]) -> None:
    for result in run(PARAMS, **options):
        P, R = len(result.prompt_ids), len(result.input_ids)
        logits = PlainForward(lively("llama"), result.input_ids.tolist()).logits
        masks = result.sampling_mask.to_lists()
        assert masks[: P - 1] == [None] * (P - 1)
        for row in range(P - 1, R):
            token = int(result.output_ids[row])
            assert set(masks[row]) == support_of(logits[row], 1.3, 12, 0.9)
            inside = (logits[row].double() / 1.3)[masks[row]].logsumexp(-1)
            assert float(result.rows["sampling_logprobs"][row]) == pytest.approx(
                float(logits[row, token] / 1.3 - inside), abs=1e-4
            )
            plain = logits[row].log_softmax(-1)
            assert float(result.rows["logprobs"][row]) == pytest.approx(float(plain[token]), abs=1e-4)
            top = logits[row].topk(5)
            torch.testing.assert_close(result.rows["topk_logits"][row], top.values, rtol=1e-4, atol=1e-4)
            assert result.rows["topk_ids"][row].tolist() == top.indices.tolist()
            assert float(result.rows["topk_logsumexp"][row]) == pytest.approx(
                float(logits[row].logsumexp(-1)), abs=1e-4
            )


def test_rows_where_nothing_was_sampled_say_so() -> None:
    result = run(PARAMS)[0]
    P = len(result.prompt_ids)
    assert result.rows["sampling_logprobs"][: P - 1].isnan().all()
    assert result.rows["topk_logits"][: P - 1].isnan().all()
    assert result.rows["topk_ids"][: P - 1].eq(-1).all()
    assert result.sampling_mask.lengths[: P - 1].tolist() == [-1] * (P - 1)


def test_a_trainer_replays_the_recorded_logprobs_from_the_rows_alone() -> None:
    for result in run(PARAMS):
        logits = PlainForward(lively("llama"), result.input_ids.tolist()).logits
        replayed = masked_log_softmax(logits / 1.3, result.sampling_mask)
        written = result.output_ids >= 0
        tokens = result.output_ids[written].long()
        found = replayed[written].gather(-1, tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(found, result.rows["sampling_logprobs"][written], rtol=0, atol=1e-4)


def test_requests_of_one_run_get_what_each_asked_for() -> None:
    plain = {"seed": 1, "max_new_tokens": 4, "ignore_eos": True}
    params = [
        SamplingParams(**plain),
        SamplingParams(**plain, return_sampling_mask=True),
        SamplingParams(**plain, top_logits=2),
        SamplingParams(**plain, top_logits=4, return_logprob=True),
        SamplingParams(**plain),
        SamplingParams(**plain),
    ]
    results = run(params)
    assert [result.sampling_mask.lengths.ge(0).sum().item() for result in results] == [0, 4, 0, 0, 0, 0]
    assert [(~result.rows["logprobs"].isnan()).sum().item() for result in results] == [0, 0, 0, 4, 0, 0]
    assert [(~result.rows["topk_logits"].isnan()).sum().item() for result in results] == [0, 0, 8, 16, 0, 0]


def test_what_nobody_asked_for_is_not_there() -> None:
    result = run(SamplingParams(max_new_tokens=2, ignore_eos=True))[0]
    assert sorted(result.rows) == ["aux_hidden_states", "input_ids", "loss_mask", "output_ids", "pre_norm"]
    assert result.sampling_mask is None


def test_greedy_rows_have_the_token_alone_with_logprob_zero() -> None:
    params = SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True, return_sampling_mask=True)
    for result in run(params):
        written = [mask for mask in result.sampling_mask.to_lists() if mask is not None]
        assert written == [[token] for token in result.token_ids]
        assert result.rows["sampling_logprobs"][-5:].tolist() == [0.0] * 5


OVERFLOW = (
    "Sampling support exceeds --sampling-mask-max-tokens=3, commonly because of cutoff ties. "
    "Lower top_k to leave more headroom or increase the server limit."
)


@pytest.mark.parametrize("lookup", [0, 3])
def test_a_support_that_overflows_ends_its_request_before_the_token(lookup: int) -> None:
    params = [SamplingParams(seed=1, max_new_tokens=4, ignore_eos=True, return_sampling_mask=True)] * len(PROMPTS)
    params[1] = SamplingParams(seed=1, top_k=3, max_new_tokens=4, ignore_eos=True, return_sampling_mask=True)
    results = run(params, sampling_mask_max_tokens=3, prompt_lookup=lookup)
    assert [result.finish_reason for result in results] == ["refused", "length"] + ["refused"] * 4
    assert results[0].finish.detail == OVERFLOW
    assert results[0].token_ids == ()
    assert results[0].aux_hidden_states.shape[0] == len(PROMPTS[0])
    assert results[0].output_ids.tolist() == [-1] * len(PROMPTS[0])
    assert len(results[1].token_ids) == 4


class WidenedAfter:
    """A grammar that leaves two tokens, and all of them once so many were sampled."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self._length:
            return scores
        return torch.full_like(scores, -math.inf).index_copy(1, torch.tensor([30, 31]), scores[:, 30:32])


@pytest.mark.parametrize("lookup", [0, 4])
def test_an_overflow_later_keeps_the_tokens_before_it_and_no_partial_mask(lookup: int) -> None:
    params = SamplingParams(
        seed=1, max_new_tokens=20, ignore_eos=True, return_sampling_mask=True, logits_processor=WidenedAfter(3 + 8)
    )
    [result] = generate_with_capture(
        lively("llama"), [PROMPTS[1]], params, layer_ids=[1], sampling_mask_max_tokens=2, prompt_lookup=lookup
    )
    assert result.finish_reason == "refused"
    assert len(result.token_ids) == 8
    assert set(result.token_ids) == {30, 31}
    masks = result.sampling_mask.to_lists()
    assert masks[:2] == [None, None]
    assert [sorted(mask) for mask in masks[2:]] == [[30, 31]] * 8


def test_a_row_without_any_likely_token_ends_its_request_alone() -> None:
    def nothing(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf)

    params = [SamplingParams(seed=1, max_new_tokens=3, ignore_eos=True)] * len(PROMPTS)
    params[4] = SamplingParams(seed=1, max_new_tokens=3, ignore_eos=True, logits_processor=nothing)
    results = run(params)
    assert [len(result.token_ids) for result in results] == [3, 3, 3, 3, 0, 3]
    assert results[4].finish_reason == "refused"
    assert "No token had a positive probability" in str(results[4].finish.detail)


class TokenEcho:
    """An observer of the caller's own, that records each sampled token once more."""

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return sampling_info

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        from hiddentap.capture.sampling import DeviceSampledRows

        return DeviceSampledRows({"echo": token_ids.clone()}, state.layout)


@pytest.mark.parametrize("lookup", [0, 3])
def test_observers_of_the_callers_own_see_every_token_and_their_rows_come_back(lookup: int) -> None:
    params = SamplingParams(seed=1, max_new_tokens=6, ignore_eos=True)
    for result in run(params, observers=[TokenEcho()], prompt_lookup=lookup):
        assert result.observed["echo"].tolist() == list(result.token_ids)


def test_masks_are_ragged_rows_with_one_entry_per_row() -> None:
    result = run(PARAMS)[2]
    assert isinstance(result.sampling_mask, RaggedRows)
    assert len(result.sampling_mask) == len(result.input_ids)
