"""Several rows of one request in one sampling call, sampled as if its guesses had come."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import CommittedTokens, CompositeHostAuxiliaryOutput, RowBuffer, RowLayout
from hiddentap.capture.sampling import (
    LogprobObserver,
    RefusedToken,
    Sampler,
    SamplingInfo,
    SamplingMaskObserver,
    SamplingParams,
    SamplingState,
    TopKLogitsObserver,
    refused_tokens,
)
from support.fake_requests import FakeBatch, FakeRequest


def info_of(params: list[SamplingParams], drafts: list[list[int]], positions: list[int]) -> SamplingInfo:
    states = [SamplingState.of(one, [1, 2], [3]) for one in params]
    layout = RowLayout(tuple(len(draft) + 1 for draft in drafts), tuple(positions), (0,) * len(params))
    return SamplingInfo(states, layout, drafts)


def test_each_row_sees_the_guesses_before_it_and_no_other() -> None:
    seen: list[list[int]] = []

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.tolist()[0])
        return scores

    params = [SamplingParams(logits_processor=grammar), SamplingParams()]
    Sampler().sample(torch.zeros(4, 9), info_of(params, [[4, 5], []], [3, 3]))
    assert seen == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_penalties_count_the_guesses_before_a_row() -> None:
    logits = torch.zeros(3, 6)
    info = info_of([SamplingParams(temperature=0, frequency_penalty=1.0)], [[4, 4]], [3])
    Sampler().sample(logits, info)
    assert info.row_requests[2].output_ids == [3, 4, 4]
    top = TopKLogitsObserver()
    info = info_of([SamplingParams(temperature=0, frequency_penalty=1.0, top_logits=6)], [[4, 4]], [3])
    output: Any = Sampler([top]).sample(logits, info).observed
    by_id = torch.zeros(3, 6).scatter_(1, output.columns["topk_ids"].long(), output.columns["topk_logits"])
    assert by_id.tolist() == [[0, 0, 0, -1, 0, 0], [0, 0, 0, -1, -1, 0], [0, 0, 0, -1, -2, 0]]


def test_a_request_with_several_rows_draws_its_numbers_in_order_and_gives_back_what_it_did_not_use() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(seed=4)
    one_by_one = info_of([params], [[]], [3])
    expected = [int(Sampler().sample(logits[row : row + 1], one_by_one).token_ids) for row in range(3)]
    together = info_of([params], [[7, 7]], [3])
    before = together.requests[0].generator.get_state()
    assert Sampler().sample(logits, together).token_ids.tolist() == expected
    together.requests[0].rewind(before, 1)
    again = info_of([params], [[7]], [3])
    again.requests = together.requests
    assert Sampler().sample(logits[1:], again).token_ids.tolist() == expected[1:]


def test_observers_record_every_row_and_committed_ones_are_kept() -> None:
    params = SamplingParams(temperature=0, return_logprob=True, return_sampling_mask=True, top_logits=2)
    logits = torch.tensor([[0.0, 9, 0], [9.0, 0, 0], [0.0, 0, 9], [0.0, 9, 0]])
    info = info_of([params, params], [[1, 0], []], [5, 8])
    observers = [SamplingMaskObserver(), LogprobObserver(), TopKLogitsObserver()]
    output = Sampler(observers).sample(logits, info)
    assert output.observed is not None
    sinks = [RowBuffer(otherwise=5), RowBuffer(otherwise=8)]
    batch = FakeBatch([FakeRequest(rows=sink) for sink in sinks])  # type: ignore[arg-type]
    host = output.observed.copy_to_host(torch.clone)
    host.consume(batch, [CommittedTokens(0, (1, 0)), CommittedTokens(0, (1,))])
    assert sinks[0].ragged_columns()["sampling_mask"].to_lists() == [[1], [0]]
    assert sinks[1].ragged_columns()["sampling_mask"].to_lists() == [[1]]
    assert sinks[0].columns()["topk_ids"][:, 0].tolist() == [1, 0]
    assert [len(sink.columns()["logprobs"]) for sink in sinks] == [2, 1]


def test_a_refusal_names_the_first_row_it_is_about_and_the_earliest_of_several_stands() -> None:
    params = SamplingParams(return_sampling_mask=True, seed=0)
    one, all_of_them = torch.tensor([0.0, -math.inf, -math.inf, -math.inf]), torch.zeros(4)
    nothing = torch.full((4,), -math.inf)
    info = info_of([params, params], [[0, 0], [0]], [5, 8])
    output = Sampler([SamplingMaskObserver(3)]).sample(torch.stack([one, all_of_them, nothing, one, nothing]), info)
    assert output.observed is not None
    masks, tokens = output.observed.copy_to_host(torch.clone), output.tokens.copy_to_host(torch.clone)
    found = refused_tokens(CompositeHostAuxiliaryOutput((tokens, masks)))
    assert {index: token.row for index, token in found.items()} == {0: 1, 1: 1}
    assert found[0].reason.startswith("Sampling support exceeds")
    assert isinstance(found[1], RefusedToken)
    sinks = [RowBuffer(otherwise=5), RowBuffer(otherwise=8)]
    batch = FakeBatch([FakeRequest(rows=sink) for sink in sinks])  # type: ignore[arg-type]
    masks.consume(batch, [CommittedTokens(0, (0, 0, 0)), CommittedTokens(0, (0, 0))])
    assert [sink.ragged_columns()["sampling_mask"].to_lists() for sink in sinks] == [[[0]], [[0]]]


@pytest.mark.parametrize(("drafts", "counts"), [([[4]], (3,)), ([[4], [5]], (1,)), ([[], []], (2, 1))])
def test_more_rows_than_guesses_allow_are_refused(drafts: list[list[int]], counts: tuple[int, ...]) -> None:
    states = [SamplingState.of(SamplingParams(), [1], []) for _ in counts]
    with pytest.raises(ValueError, match="at most one row and one more per drafted token"):
        SamplingInfo(states, RowLayout(counts, (0,) * len(counts), (0,) * len(counts)), drafts)
