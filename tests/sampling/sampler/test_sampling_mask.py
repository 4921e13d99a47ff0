"""Sampling masks: the support that produced the token, or nothing at all."""

import math
from typing import Any

import pytest
import torch

from hiddentap.capture.outputs import CommittedTokens, CompositeHostAuxiliaryOutput, RowBuffer, RowLayout
from hiddentap.capture.sampling import (
    DeviceSamplingMasks,
    HostSamplingMasks,
    RefusedToken,
    Sampler,
    SamplingInfo,
    SamplingMaskObserver,
    SamplingParams,
    refused_tokens,
)
from support.fake_requests import FakeBatch, FakeRequest
from support.sampling_calls import sampling_info

OVERFLOW_OF_3 = (
    "Sampling support exceeds --sampling-mask-max-tokens=3, commonly because of cutoff ties. "
    "Lower top_k to leave more headroom or increase the server limit."
)
INVALID = "The sampling backend selected a token outside its captured sampling support."


def host_masks(logits: torch.Tensor, info: SamplingInfo, max_tokens: int = 4096) -> tuple[list[int], HostSamplingMasks]:
    output = Sampler([SamplingMaskObserver(max_tokens)]).sample(logits, info)
    assert isinstance(output.observed, DeviceSamplingMasks)
    return output.token_ids.tolist(), output.observed.copy_to_host(torch.clone)


def buffers(host: HostSamplingMasks, count: int, committed: list[bool] | None = None) -> list[RowBuffer]:
    sinks = [RowBuffer() for _ in range(count)]
    commits = [CommittedTokens(0, (1,)) if one else None for one in committed or [True] * count]
    host.consume(FakeBatch([FakeRequest(rows=sink) for sink in sinks]), commits)  # type: ignore[arg-type]
    return sinks


def masks_of(sink: RowBuffer) -> list[list[int] | None]:
    return sink.ragged_columns()["sampling_mask"].to_lists()


def one_mask(probabilities: list[float], params: SamplingParams) -> tuple[int, list[int], float]:
    """The sampled token, its support and its log-probability in it."""
    [token], host = host_masks(torch.tensor([probabilities]).log(), sampling_info([params]))
    [sink] = buffers(host, 1)
    [mask] = masks_of(sink)
    assert mask is not None
    return token, mask, sink.columns()["sampling_logprobs"].item()


def test_ties_at_the_cutoff_are_part_of_the_support() -> None:
    _, mask, _ = one_mask([0.4, 0.2, 0.2, 0.2], SamplingParams(top_k=2, return_sampling_mask=True))
    assert mask == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_logprob_is_that_of_the_renormalised_support(seed: int) -> None:
    params = SamplingParams(top_k=2, top_p=0.6, seed=seed, return_sampling_mask=True)
    token, mask, logprob = one_mask([0.2, 0.3, 0.5], params)
    assert mask == [2, 1]
    assert logprob == pytest.approx(math.log({2: 0.5, 1: 0.3}[token] / 0.8), abs=1e-6)


def test_the_support_is_ordered_by_weight_and_equal_weights_by_id() -> None:
    _, mask, _ = one_mask([0.1, 0.25, 0.3, 0.1, 0.25], SamplingParams(return_sampling_mask=True))
    assert mask == [2, 1, 4, 0, 3]


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_greedy_has_the_token_alone_and_logprob_zero(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, return_sampling_mask=True)
    assert one_mask([0.3, 0.4, 0.3], params) == (1, [1], 0.0)


def test_the_support_is_that_after_grammar_and_bias() -> None:
    def forbid_two(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 2] = -math.inf
        return scores

    params = SamplingParams(return_sampling_mask=True, logits_processor=forbid_two, logit_bias={0: -math.inf})
    token, mask, logprob = one_mask([0.25, 0.25, 0.25, 0.25], params)
    assert mask == [1, 3]
    assert token in mask
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_the_sampled_token_is_always_inside_its_support() -> None:
    generator = torch.Generator().manual_seed(2)
    params = [SamplingParams(seed=row, top_p=0.7, top_k=9, return_sampling_mask=True) for row in range(64)]
    info = sampling_info(params)
    for _ in range(30):
        tokens, host = host_masks(torch.randn(64, 50, generator=generator) * 3, info)
        assert refused_tokens(host) == {}
        masks = [masks_of(sink)[0] for sink in buffers(host, 64)]
        assert all(mask is not None and token in mask for token, mask in zip(tokens, masks, strict=True))


def test_only_requests_that_asked_are_captured() -> None:
    asks, silent = SamplingParams(temperature=0.0, return_sampling_mask=True), SamplingParams(temperature=0.0)
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    _, host = host_masks(logits, sampling_info([silent, asks]))
    silent_rows, asked_rows = buffers(host, 2)
    assert silent_rows.ragged_columns() == {}
    assert silent_rows.columns() == {}
    assert masks_of(asked_rows) == [[2]]


def test_the_observer_is_inactive_when_nobody_asked() -> None:
    assert not SamplingMaskObserver().is_active(sampling_info([SamplingParams()]))
    asks = SamplingParams(return_sampling_mask=True)
    assert not SamplingMaskObserver().is_active(sampling_info([asks, SamplingParams()], row_counts=[0, 1]))
    assert SamplingMaskObserver().is_active(sampling_info([asks, SamplingParams()]))


def test_a_support_beyond_the_limit_is_refused_and_no_part_of_it_is_stored() -> None:
    params = SamplingParams(top_k=2, return_sampling_mask=True)
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.4, 0.3, 0.2, 0.1]]).log()
    _, host = host_masks(logits, sampling_info([params, params]), max_tokens=3)
    assert refused_tokens(host) == {0: RefusedToken(0, OVERFLOW_OF_3)}
    overflowing, fine = buffers(host, 2)
    assert overflowing.ragged_columns() == {}
    assert overflowing.columns() == {}
    assert masks_of(fine) == [[0, 1]]


@pytest.mark.parametrize(("limit", "refused"), [(3, {0: RefusedToken(0, OVERFLOW_OF_3)}), (4, {})])
def test_the_limit_itself_still_fits(limit: int, refused: dict[int, RefusedToken]) -> None:
    params = SamplingParams(return_sampling_mask=True)
    _, host = host_masks(torch.zeros(1, 4), sampling_info([params]), max_tokens=limit)
    assert refused_tokens(host) == refused


def masks_from_weights(weights: list[list[float]], tokens: list[int]) -> HostSamplingMasks:
    """What the observer records when it is shown these weights and tokens, whatever sampler they came from."""
    info = sampling_info([SamplingParams(return_sampling_mask=True)] * len(tokens))
    observer = SamplingMaskObserver()
    state = observer.before_grammar(torch.zeros(len(tokens), len(weights[0])), info)
    info.weights = torch.tensor(weights)
    return observer.after_sample(state, torch.tensor(tokens)).copy_to_host(torch.clone)


@pytest.mark.parametrize(
    "row", [[0.5, 0.5, 0.0], [math.nan, 0.5, math.nan], [0.0, 0.0, 0.0], [0.1, 0.1, math.inf]],
    ids=["no weight", "NaN", "empty", "infinite"],
)  # fmt: skip
def test_a_token_outside_its_support_is_refused_and_stored_nowhere(row: list[float]) -> None:
    host = masks_from_weights([row, [0.2, 0.2, 0.6]], [2, 2])
    assert refused_tokens(host) == {0: RefusedToken(0, INVALID)}
    broken, fine = buffers(host, 2)
    assert broken.ragged_columns() == {}
    assert masks_of(fine) == [[2, 0, 1]]


def test_the_reason_of_a_mask_stands_beside_that_of_the_tokens() -> None:
    params = SamplingParams(return_sampling_mask=True)
    output = Sampler([SamplingMaskObserver()]).sample(torch.full((1, 3), math.nan), sampling_info([params]))
    assert output.observed is not None
    root = CompositeHostAuxiliaryOutput(
        (output.tokens.copy_to_host(torch.clone), output.observed.copy_to_host(torch.clone))
    )
    assert refused_tokens(root) == {0: RefusedToken(0, INVALID)}


def test_an_uncommitted_row_is_not_stored() -> None:
    params = SamplingParams(return_sampling_mask=True)
    _, host = host_masks(torch.zeros(2, 3), sampling_info([params, params]))
    kept, dropped = buffers(host, 2, committed=[True, False])
    assert len(masks_of(kept)) == 1
    assert dropped.ragged_columns() == {}


def test_every_tensor_is_copied_once_for_the_whole_batch() -> None:
    params = SamplingParams(return_sampling_mask=True)
    output = Sampler([SamplingMaskObserver()]).sample(torch.zeros(3, 4), sampling_info([params] * 3)).observed
    assert isinstance(output, DeviceSamplingMasks)
    expected = list(output.columns.values())
    copied: list[torch.Tensor] = []
    output.copy_to_host(lambda tensor: copied.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert len(copied) == len(expected) == 5
    assert all(seen is column for seen, column in zip(copied, expected, strict=True))


def test_ids_are_int32_and_logprobs_float32() -> None:
    [sink] = buffers(host_masks(torch.zeros(1, 4), sampling_info([SamplingParams(return_sampling_mask=True)]))[1], 1)
    rows = sink.ragged_columns()["sampling_mask"]
    assert (rows.lengths.dtype, rows.values.dtype) == (torch.int32, torch.int32)
    assert sink.columns()["sampling_logprobs"].dtype == torch.float32


def test_masks_cross_a_pipeline_with_their_refusals() -> None:
    params = [SamplingParams(), SamplingParams(return_sampling_mask=True, top_k=2)]
    observer = SamplingMaskObserver(3)
    info = sampling_info(params, first_positions=[5, 7])
    sent: Any = Sampler([observer]).sample(torch.tensor([[0.0] * 4, [0.0] * 4]), info).observed
    rebuilt = observer.from_pp_tensors(sent.to_pp_tensors())
    assert rebuilt.layout == RowLayout((0, 1), (5, 7), (0, 0))
    assert refused_tokens(rebuilt.copy_to_host(torch.clone)) == {1: RefusedToken(0, OVERFLOW_OF_3)}


def test_an_observer_that_was_given_no_weights_says_so() -> None:
    info = sampling_info([SamplingParams(return_sampling_mask=True)])
    with pytest.raises(RuntimeError, match=r"needs sampling_info\.weights"):
        SamplingMaskObserver().after_sample(info, torch.tensor([0]))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="found max_tokens=0"):
        SamplingMaskObserver(0)


@pytest.mark.parametrize(("top_k", "widest"), [(50, 50), (1, 1), (0, 4096)])
def test_a_mask_is_as_wide_as_the_largest_support_and_not_as_the_limit(top_k: int, widest: int) -> None:
    logits = torch.randn(3, 6000, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(top_k=top_k, return_sampling_mask=True, seed=1)
    output = Sampler([SamplingMaskObserver()]).sample(logits, sampling_info([params] * 3))
    assert isinstance(output.observed, DeviceSamplingMasks)
    assert output.observed.columns["ids"].shape == (3, widest)
    if top_k == 50:
        expected = logits.topk(50, dim=-1).indices.tolist()
        assert [sorted(row) for row in output.observed.columns["ids"].tolist()] == [sorted(row) for row in expected]
