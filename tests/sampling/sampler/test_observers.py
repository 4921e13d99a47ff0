"""Log-probabilities and top logits: right values, only for those who asked, on the rows they belong to."""

import math
from typing import Any

import pytest
import torch

from hiddentap.capture.outputs import CommittedTokens, RowLayout
from hiddentap.capture.sampling import LogprobObserver, Sampler, SamplingParams, TopKLogitsObserver
from support.fake_requests import FakeBatch, FakeRequest
from support.sampling_calls import sampling_info


def consumed(observer: Any, logits: torch.Tensor, params: list[SamplingParams], **info: Any) -> list[list[Any]]:
    """What one step appends to each request, every token committed."""
    call = sampling_info(params, **info)
    output = Sampler([observer]).sample(logits, call)
    assert output.observed is not None
    batch = FakeBatch([FakeRequest() for _ in params])
    commits = [CommittedTokens(0, (1,)) if count else None for count in call.layout.row_counts]
    output.observed.copy_to_host(torch.clone).consume(batch, commits)
    return [request.rows.appends for request in batch.reqs]


def test_a_logprob_is_the_log_softmax_of_the_sampled_token_before_bias_and_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    params = SamplingParams(temperature=0.0, return_logprob=True, logit_bias={0: 100.0}, top_k=1)
    [[(position, columns)]] = consumed(LogprobObserver(), logits, [params], first_positions=[6])
    total = math.exp(1) + math.exp(2) + math.exp(4)
    assert position == 6
    assert columns["logprobs"] == [pytest.approx(1 - math.log(total), abs=1e-6)]


def test_a_logprob_follows_the_penalties() -> None:
    params = SamplingParams(temperature=0.0, return_logprob=True, presence_penalty=1.0)
    [[(_, columns)]] = consumed(LogprobObserver(), torch.tensor([[3.0, 0.0]]), [params], outputs=[[0]])
    assert columns["logprobs"] == [pytest.approx(2 - math.log(math.exp(2) + 1), abs=1e-6)]


def test_only_requests_that_asked_get_a_logprob() -> None:
    asks, silent = SamplingParams(temperature=0.0, return_logprob=True), SamplingParams(temperature=0.0)
    logits = torch.tensor([[0.0, 5.0], [0.0, 6.0], [0.0, 7.0]])
    appended = consumed(
        LogprobObserver(), logits, [silent, asks, silent, asks], row_counts=[1, 1, 0, 1], first_positions=[1, 2, 3, 4]
    )
    assert [len(appends) for appends in appended] == [0, 1, 0, 1]
    assert appended[1][0] == (2, {"logprobs": [pytest.approx(-math.log1p(math.exp(-6)), abs=1e-6)]})
    assert appended[3][0] == (4, {"logprobs": [pytest.approx(-math.log1p(math.exp(-7)), abs=1e-6)]})


@pytest.mark.parametrize("observer", [LogprobObserver(), TopKLogitsObserver()])
@pytest.mark.parametrize("row_counts", [[1, 1], [0, 1]])
def test_observers_are_inactive_when_no_sampled_row_asked(observer: Any, row_counts: list[int]) -> None:
    asks = SamplingParams(return_logprob=row_counts[0] == 0, top_logits=3 * (row_counts[0] == 0))
    assert not observer.is_active(sampling_info([asks, SamplingParams()], row_counts=row_counts))


def test_top_logits_are_the_largest_in_order_with_their_ids_and_the_log_sum_exp_of_all() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    params = SamplingParams(top_logits=2, temperature=2.0, logit_bias={0: 50.0})
    [[(position, columns)]] = consumed(TopKLogitsObserver(), logits, [params], first_positions=[3])
    assert position == 3
    assert columns["topk_logits"] == [[4.0, 3.0]]
    assert columns["topk_ids"] == [[1, 3]]
    total = math.log(sum(math.exp(value) for value in (1, 2, 3, 4)))
    assert columns["topk_logsumexp"] == [pytest.approx(total, abs=1e-6)]


def test_each_request_gets_as_many_top_logits_as_it_asked_for() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    params = [SamplingParams(top_logits=1), SamplingParams(), SamplingParams(top_logits=3)]
    appended = consumed(TopKLogitsObserver(), logits, params)
    assert appended[0][0][1]["topk_logits"] == [[3.0]]
    assert appended[1] == []
    assert appended[2][0][1]["topk_ids"] == [[0, 1, 2]]


def test_asking_for_more_top_logits_than_there_are_tokens_gives_all_of_them() -> None:
    [[(_, columns)]] = consumed(TopKLogitsObserver(), torch.tensor([[1.0, 2.0]]), [SamplingParams(top_logits=9)])
    assert columns["topk_ids"] == [[1, 0]]


def test_dtypes_are_those_of_the_file_format() -> None:
    info = sampling_info([SamplingParams(top_logits=2, return_logprob=True)])
    output = Sampler([LogprobObserver(), TopKLogitsObserver()]).sample(torch.zeros(1, 4, dtype=torch.bfloat16), info)
    logprobs, top = output.observed.outputs  # type: ignore[union-attr]
    assert logprobs.columns["logprobs"].dtype == torch.float32
    assert {name: column.dtype for name, column in top.columns.items() if name != "topk_counts"} == {
        "topk_logits": torch.float32,
        "topk_ids": torch.int32,
        "topk_logsumexp": torch.float32,
    }
    assert output.tokens.columns["output_ids"].dtype == torch.int32


@pytest.mark.parametrize("observer", [LogprobObserver(), TopKLogitsObserver()])
def test_what_crosses_a_pipeline_is_rebuilt_with_its_rows(observer: Any) -> None:
    params = [SamplingParams(), SamplingParams(return_logprob=True, top_logits=2)]
    info = sampling_info(params, first_positions=[3, 8])
    sent = Sampler([observer]).sample(torch.randn(2, 5), info).observed
    rebuilt = observer.from_pp_tensors(sent.to_pp_tensors())  # type: ignore[union-attr]
    assert type(rebuilt) is type(sent)
    assert rebuilt.layout == RowLayout((0, 1), (3, 8), (0, 0))
    assert rebuilt.columns.keys() == sent.columns.keys()  # type: ignore[union-attr]
    assert all(torch.equal(rebuilt.columns[name], column) for name, column in sent.columns.items())  # type: ignore[union-attr]


def test_rows_without_their_layout_are_refused() -> None:
    with pytest.raises(RuntimeError, match="need a tensor 'row_layout' beside their columns"):
        LogprobObserver().from_pp_tensors({"logprobs": torch.zeros(1)})
