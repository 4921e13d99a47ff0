"""The sampler: the order of its steps, its random numbers, and what stays untouched."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import CommittedTokens, CompositeDeviceAuxiliaryOutput, HostStepRows, RowLayout
from hiddentap.capture.sampling import (
    DeviceSampledTokens,
    LogprobObserver,
    Sampler,
    SamplingInfo,
    SamplingMaskObserver,
    SamplingParams,
    SamplingState,
    TopKLogitsObserver,
    refused_tokens,
)
from hiddentap.capture.sampling.sampler.sampler import _drawn
from support.fake_requests import FakeBatch, FakeRequest
from support.sampling_calls import sampling_info


def draw(logits: Tensor, params: list[SamplingParams], **info: Any) -> list[int]:
    return Sampler().sample(logits, sampling_info(params, **info)).token_ids.tolist()


class FakeRows:
    def __init__(self, name: str) -> None:
        self.name = name

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
        raise NotImplementedError


class LookingObserver:
    """Notes its calls; what it returns is chosen by the test."""

    def __init__(self, log: list[Any], active: bool = True, state: Any = "state", output: Any = None) -> None:
        self.log, self.active, self.state, self.output = log, active, state, output

    def is_active(self, sampling_info: SamplingInfo) -> bool:
        self.log.append("is_active")
        return self.active

    def before_grammar(self, logits: Tensor, sampling_info: SamplingInfo) -> Any:
        self.log.append(("before_grammar", logits.clone(), sampling_info.weights))
        return self.state

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        self.log.append(("after_sample", state, token_ids.tolist()))
        return self.output


def test_observers_are_called_in_order_around_the_sampling() -> None:
    log: list[Any] = []

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        log.append("grammar")
        return scores

    Sampler([LookingObserver(log)]).sample(torch.zeros(1, 3), sampling_info([SamplingParams(logits_processor=grammar)]))
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == [
        "is_active",
        "before_grammar",
        "grammar",
        "after_sample",
    ]


def test_an_inactive_observer_is_asked_once_and_then_left_alone() -> None:
    log: list[Any] = []
    Sampler([LookingObserver(log, active=False)]).sample(torch.zeros(1, 3), sampling_info([SamplingParams()]))
    assert log == ["is_active"]


def test_after_sample_is_skipped_when_the_state_is_none() -> None:
    log: list[Any] = []
    observer = LookingObserver(log, state=None, output=FakeRows("never"))
    assert Sampler([observer]).sample(torch.zeros(1, 3), sampling_info([SamplingParams()])).observed is None
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == ["is_active", "before_grammar"]


def test_a_state_that_is_false_but_not_none_still_gets_its_after_sample() -> None:
    output = FakeRows("a")
    result = Sampler([LookingObserver([], state=0, output=output)]).sample(
        torch.zeros(1, 3), sampling_info([SamplingParams()])
    )
    assert result.observed is output


def test_outputs_of_several_observers_are_appended_in_order() -> None:
    first, second = FakeRows("first"), FakeRows("second")
    observers = [
        LookingObserver([], output=first),
        LookingObserver([], output=None),
        LookingObserver([], output=second),
    ]
    observed = Sampler(observers).sample(torch.zeros(1, 3), sampling_info([SamplingParams()])).observed
    assert isinstance(observed, CompositeDeviceAuxiliaryOutput)
    assert observed.outputs == (first, second)


def test_an_observer_sees_logits_after_penalties_and_before_grammar_and_bias() -> None:
    def forbid_one(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 1] = -math.inf
        return scores

    log: list[Any] = []
    params = SamplingParams(presence_penalty=0.5, logit_bias={2: 7.0}, logits_processor=forbid_one)
    info = sampling_info([params], outputs=[[0]])
    Sampler([LookingObserver(log)]).sample(torch.tensor([[1.0, 2.0, 3.0]]), info)
    assert log[1][1].tolist() == [[0.5, 2.0, 3.0]]
    assert info.weights is not None
    odds = math.exp(10.0 - 0.5)
    torch.testing.assert_close(info.weights, torch.tensor([[1 / (1 + odds), 0.0, odds / (1 + odds)]]))


def test_the_weights_of_an_earlier_call_are_never_seen_by_an_observer_of_the_next() -> None:
    log: list[Any] = []
    sampler = Sampler([LookingObserver(log)])
    info = sampling_info([SamplingParams()])
    sampler.sample(torch.zeros(1, 3), info)
    sampler.sample(torch.zeros(1, 3), info)
    assert [entry[2] for entry in log if entry[0] == "before_grammar"] == [None, None]


def test_the_logits_of_the_model_are_not_written_to() -> None:
    def forbid_all_but_zero(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill_(1, torch.tensor([1, 2]), -math.inf)

    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    params = SamplingParams(
        repetition_penalty=2.0, logit_bias={0: 5.0}, logits_processor=forbid_all_but_zero, temperature=0.5
    )
    assert draw(logits, [params, SamplingParams(temperature=0.0)], outputs=[[2], []]) == [0, 2]
    assert logits.tolist() == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]


def test_a_grammar_sees_prompt_and_output_of_its_own_request_only() -> None:
    seen: list[list[int]] = []

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.tolist()[0])
        assert input_ids.dtype == torch.int64
        assert scores.shape == (1, 4)
        return scores

    params = [SamplingParams(), SamplingParams(logits_processor=grammar)]
    draw(torch.zeros(2, 4), params, prompts=[[3, 3], [1, 2]], outputs=[[0], [3]])
    assert seen == [[1, 2, 3]]


def test_a_grammar_that_changes_the_shape_is_refused() -> None:
    params = SamplingParams(logits_processor=lambda input_ids, scores: scores[:, :2])
    with pytest.raises(RuntimeError, match=r"scores of shape \(1, 4\).*returned \(1, 2\)"):
        draw(torch.zeros(1, 4), [params])


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias names token 4, but the model has 4 tokens"):
        draw(torch.zeros(1, 4), [SamplingParams(logit_bias={4: 1.0})])


def test_a_bias_of_minus_infinity_forbids_a_token() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={2: -math.inf})
    assert draw(torch.tensor([[1.0, 2.0, 3.0]]), [params]) == [1]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(repetition_penalty=2.0), [1.0, -2.0, 1.5, 0.5, -2.0]),
        (SamplingParams(presence_penalty=0.5), [2.0, -1.0, 2.5, 0.5, -1.5]),
        (SamplingParams(frequency_penalty=0.5), [2.0, -1.0, 2.0, 0.5, -1.5]),
        (
            SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=1.0),
            [1.0, -2.0, -0.75, 0.5, -3.25],
        ),
    ],
    ids=["repetition", "presence", "frequency", "all"],
)
def test_penalties_by_hand(params: SamplingParams, expected: list[float]) -> None:
    # Prompt holds 0, 1 and 4 once; output holds 2 twice and 4 once: repetition counts both, the others the output alone.
    log: list[Any] = []
    info = sampling_info([params], prompts=[[0, 1, 4]], outputs=[[2, 2, 4]])
    Sampler([LookingObserver(log)]).sample(torch.tensor([[2.0, -1.0, 3.0, 0.5, -1.0]]), info)
    assert log[1][1].tolist() == [expected]


def test_penalties_of_one_request_leave_the_others_alone() -> None:
    log: list[Any] = []
    params = [SamplingParams(), SamplingParams(presence_penalty=1.0)]
    info = sampling_info(params, outputs=[[0], [0]])
    Sampler([LookingObserver(log)]).sample(torch.ones(2, 2), info)
    assert log[1][1].tolist() == [[1.0, 1.0], [0.0, 1.0]]


def test_sampled_frequencies_follow_the_weights() -> None:
    info = sampling_info([SamplingParams(seed=3)])
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log()
    counts = [0, 0, 0, 0]
    for _ in range(4000):
        counts[int(Sampler().sample(logits, info).token_ids)] += 1
    assert counts[3] == 0
    # Four standard deviations of a binomial with 4000 draws are at most 127.
    assert [abs(count - expected) < 127 for count, expected in zip(counts, [2000, 1200, 800], strict=False)] == [
        True
    ] * 3


def test_a_token_without_weight_is_never_drawn_however_the_uniform_falls() -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 500] = 1.0
    info = sampling_info([SamplingParams(seed=0)])
    assert {int(Sampler().sample(logits, info).token_ids) for _ in range(50)} == {500}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.4, 1), (0.6, 3), (1.0 - 2.0**-53, 3), (1.0, 3)])
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_token_of_the_support(uniform: float, token: int) -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.3000001, 0.0]])
    assert _drawn(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def tokens_of(params: list[SamplingParams], logits: list[Tensor], observers: list[Any], mates: int = 0) -> list[int]:
    """Tokens of request 0 over several steps, beside `mates` other requests that sample too."""
    everyone = [*params, *(SamplingParams(seed=90 + mate, top_k=3) for mate in range(mates))]
    info = sampling_info(everyone)
    sampler = Sampler(observers)
    return [int(sampler.sample(step[: 1 + mates], info).token_ids[0]) for step in logits]


def steps(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(4, 200, generator=generator) for _ in range(count)]


def test_seeded_tokens_are_the_same_again_and_differ_between_seeds() -> None:
    first = tokens_of([SamplingParams(seed=1)], steps(30), [])
    assert tokens_of([SamplingParams(seed=1)], steps(30), []) == first
    assert tokens_of([SamplingParams(seed=2)], steps(30), []) != first
    assert len(set(first)) > 10


def test_without_a_seed_two_requests_draw_different_tokens() -> None:
    assert tokens_of([SamplingParams()], steps(30), []) != tokens_of([SamplingParams()], steps(30), [])


@pytest.mark.parametrize("mates", [1, 3])
def test_batch_mates_do_not_change_the_tokens_of_a_request(mates: int) -> None:
    alone = tokens_of([SamplingParams(seed=1, top_p=0.9)], steps(30), [])
    assert tokens_of([SamplingParams(seed=1, top_p=0.9)], steps(30), [], mates) == alone


def test_requests_that_sample_nothing_in_a_step_use_up_no_random_number() -> None:
    logits = steps(4)
    alone = tokens_of([SamplingParams(seed=1)], [logits[0], logits[2]], [])
    info = sampling_info([SamplingParams(seed=1), SamplingParams(seed=2)])
    sampler = Sampler()
    first = int(sampler.sample(logits[0][:2], info).token_ids[0])
    skipped = sampling_info([SamplingParams(seed=1), SamplingParams(seed=2)], row_counts=[0, 1])
    skipped.requests = info.requests
    sampler.sample(logits[1][:1], skipped)
    assert [first, int(sampler.sample(logits[2][:2], info).token_ids[0])] == alone


def test_observers_that_only_look_leave_seeded_tokens_as_they_are() -> None:
    params = SamplingParams(
        seed=1, temperature=0.8, top_p=0.9, return_logprob=True, return_sampling_mask=True, top_logits=4
    )
    observers = [SamplingMaskObserver(), LogprobObserver(), TopKLogitsObserver(), LookingObserver([])]
    assert tokens_of([params], steps(40), observers) == tokens_of([params], steps(40), [])


def test_greedy_takes_the_likeliest_token_and_half_precision_logits_are_welcome() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    assert draw(logits, [SamplingParams(temperature=0.0)]) == [1]
    assert draw(logits, [SamplingParams(temperature=1e-30)]) == [1]


def test_the_sampled_tokens_are_an_output_of_their_own_on_the_sampled_rows() -> None:
    info = sampling_info([SamplingParams(temperature=0.0)] * 3, row_counts=[1, 0, 1], first_positions=[4, 9, 2])
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    tokens = Sampler().sample(logits, info).tokens
    assert isinstance(tokens, DeviceSampledTokens)
    host = tokens.copy_to_host(torch.clone)
    assert host.token_ids() == [[1], [], [2]]
    batch = FakeBatch([FakeRequest(), FakeRequest(), FakeRequest()])
    host.consume(batch, [CommittedTokens(0, (1,)), None, None])
    assert [request.rows.appends for request in batch.reqs] == [[(4, {"output_ids": [1]})], [], []]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0)])
def test_a_row_without_any_likely_token_is_refused_before_the_commit_and_the_others_are_not(
    params: SamplingParams,
) -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [-math.inf, -math.inf]])
    host = Sampler().sample(logits, sampling_info([params] * 3)).tokens.copy_to_host(torch.clone)
    refused = refused_tokens(host)
    assert sorted(refused) == [1, 2]
    assert refused[1].reason.startswith("No token had a positive probability")


def test_outputs_that_refuse_nothing_are_asked_for_nothing() -> None:
    assert refused_tokens(HostStepRows({}, RowLayout.of_prompts([]))) == {}


@pytest.mark.parametrize(
    ("row_counts", "first_positions", "found"), [([2], [0], r"\(2,\)"), ([1, 1], [0, 0], r"\(1, 1\)")]
)
def test_a_call_has_at_most_one_row_per_request(row_counts: list[int], first_positions: list[int], found: str) -> None:
    with pytest.raises(ValueError, match=f"found row counts {found}"):
        sampling_info_of_one(row_counts, first_positions)


def sampling_info_of_one(row_counts: list[int], first_positions: list[int]) -> SamplingInfo:
    layout = RowLayout(tuple(row_counts), tuple(first_positions), (0,) * len(row_counts))
    return SamplingInfo([SamplingState.of(SamplingParams(), [], [])], layout)


def test_a_step_in_which_nobody_samples_gives_no_token() -> None:
    output = Sampler([SamplingMaskObserver()]).sample(
        torch.zeros(0, 5), sampling_info([SamplingParams()], row_counts=[0])
    )
    assert output.token_ids.tolist() == []
    assert output.observed is None
    assert output.tokens.copy_to_host(torch.clone).token_ids() == [[]]
