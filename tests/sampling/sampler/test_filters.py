"""Which tokens may be sampled: cases by hand, and an oracle in plain Python over random logits."""

import math
import random

import pytest
import torch

from hiddentap.capture.sampling import SamplingParams
from hiddentap.capture.sampling.sampler.filters import filtered_weights


def support(probabilities: list[float], params: SamplingParams) -> list[int]:
    weights = filtered_weights(torch.tensor([probabilities]).log(), [params])
    return weights[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("probabilities", "params", "expected"),
    [
        ([0.4, 0.2, 0.2, 0.2], SamplingParams(top_k=2), [0, 1, 2, 3]),
        ([0.4, 0.2, 0.2, 0.2], SamplingParams(top_k=1), [0]),
        ([0.5, 0.3, 0.2], SamplingParams(top_k=2, top_p=0.6), [0, 1]),
        ([0.5, 0.3, 0.2], SamplingParams(top_k=1, top_p=0.6), [0]),
        ([0.5, 0.3, 0.2], SamplingParams(top_p=0.45), [0]),
        ([0.5, 0.3, 0.2], SamplingParams(top_p=0.81), [0, 1, 2]),
        ([0.1, 0.3, 0.3, 0.3], SamplingParams(top_p=0.5), [1, 2, 3]),
        ([0.5, 0.3, 0.2], SamplingParams(min_p=0.5), [0, 1]),
        ([0.5, 0.3, 0.2], SamplingParams(min_p=1.0), [0]),
        ([0.5, 0.3, 0.15, 0.05], SamplingParams(top_k=3, top_p=0.96, min_p=0.4), [0, 1]),
        ([0.5, 0.3, 0.2], SamplingParams(), [0, 1, 2]),
        ([0.5, 0.3, 0.2], SamplingParams(top_k=50), [0, 1, 2]),
        ([0.5, 0.0, 0.5], SamplingParams(), [0, 2]),
        ([0.5, 0.0, 0.5], SamplingParams(top_k=3), [0, 2]),
        ([0.2, 0.5, 0.3], SamplingParams(temperature=0.0), [1]),
        ([0.2, 0.5, 0.3], SamplingParams(temperature=0.0, top_k=2, top_p=0.9, min_p=0.1), [1]),
        ([0.4, 0.4, 0.2], SamplingParams(temperature=0.0), [0]),
    ],
)
def test_cases_by_hand(probabilities: list[float], params: SamplingParams, expected: list[int]) -> None:
    assert support(probabilities, params) == expected


def test_top_p_is_measured_on_the_full_distribution_not_on_what_top_k_left() -> None:
    # Renormalised after top-k, the first token alone would hold 0.625 of the mass.
    assert support([0.5, 0.3, 0.2], SamplingParams(top_k=2, top_p=0.6)) == [0, 1]


def test_weights_are_the_probabilities_themselves_and_zero_outside() -> None:
    weights = filtered_weights(torch.tensor([[0.5, 0.3, 0.2]]).log(), [SamplingParams(top_k=2)])
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.3, 0.0]]))


def test_temperature_divides_the_logits_before_the_filters() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights = filtered_weights(logits, [SamplingParams(temperature=0.5)])
    total = math.exp(4) + math.exp(2) + 1
    torch.testing.assert_close(weights, torch.tensor([[math.exp(4) / total, math.exp(2) / total, 1 / total]]))


def test_top_p_of_one_cuts_nothing_though_rounding_reaches_one_early() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 0] = 20.0
    mixed = [SamplingParams(), SamplingParams(top_p=0.5)]
    weights = filtered_weights(logits.repeat(2, 1), mixed)
    assert (weights > 0).sum(dim=-1).tolist() == [50_000, 1]


def test_every_row_follows_its_own_parameters() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(5, 1)
    params = [
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.65),
        SamplingParams(min_p=0.6),
        SamplingParams(temperature=0.0),
    ]
    weights = filtered_weights(logits, params)
    assert [row.nonzero().flatten().tolist() for row in weights] == [[0, 1, 2, 3], [0], [0, 1], [0, 1], [0]]
    assert weights[4].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)])
def test_a_row_with_a_logit_that_is_not_finite_has_no_positive_weight_and_harms_no_other(
    bad: float, params: SamplingParams
) -> None:
    weights = filtered_weights(torch.tensor([[1.0, bad, 0.0], [0.0, 9.0, 0.0]]), [params, params])
    assert not (weights[0] > 0).any()
    assert weights[1, 1] > 0.99


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=2)])
def test_a_row_where_everything_is_ruled_out_has_no_positive_weight(params: SamplingParams) -> None:
    assert not (filtered_weights(torch.full((1, 4), -math.inf), [params]) > 0).any()


def oracle(logits: list[float], params: SamplingParams) -> set[int]:
    """The support by sorting and adding up, in Python's float64."""
    scaled = [logit / params.temperature for logit in logits]
    peak = max(scaled)
    masses = [math.exp(value - peak) for value in scaled]
    total = math.fsum(masses)
    order = sorted(range(len(logits)), key=lambda token: -scaled[token])
    allowed = set(order)
    if params.top_k:
        kth = scaled[order[min(params.top_k, len(order)) - 1]]
        allowed &= {token for token in order if scaled[token] >= kth}
    if params.top_p < 1:
        nucleus, mass = [], 0.0
        for token in order:
            nucleus.append(token)
            mass += masses[token] / total
            if mass >= params.top_p:
                break
        allowed &= {token for token in order if scaled[token] >= scaled[nucleus[-1]]}
    return {token for token in allowed if masses[token] >= params.min_p * max(masses)}


def random_params(source: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=source.choice([0.3, 0.7, 1.0, 1.7]),
        top_k=source.choice([0, 0, 1, 2, 5, 17, 1000]),
        top_p=source.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
        min_p=source.choice([0.0, 0.0, 0.02, 0.3]),
    )


def test_supports_equal_those_of_an_oracle_that_sorts_and_adds_up() -> None:
    source = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    for _ in range(60):
        params = [random_params(source) for _ in range(64)]
        logits = torch.randn(64, 40, generator=generator) * source.choice([0.5, 1.5, 3.0])
        if source.random() < 0.5:
            logits = logits.mul(2).round() / 2  # many exact ties
        weights = filtered_weights(logits, params)
        for row, one, row_weights in zip(logits.tolist(), params, weights, strict=True):
            found = set(row_weights.nonzero().flatten().tolist())
            assert found == oracle(row, one), (one, row)
