"""Sampling parameters are checked when they are made."""

import math
from typing import Any

import pytest

from hiddentap.capture.sampling import SamplingParams


def test_defaults_change_nothing_and_record_nothing() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_new_tokens, params.stop, params.stop_token_ids, params.ignore_eos) == (128, (), (), False)
    assert (params.return_sampling_mask, params.return_logprob, params.top_logits) == (False, False, 0)
    assert not params.has_penalties
    assert not params.is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_new_tokens", 0),
        ("top_logits", -1),
        ("stop", "END"),
        ("stop", ["END", ""]),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["2"]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: "1"}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} .*found"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-9, True), (1e-5, False), (0.7, False)])
def test_a_temperature_of_zero_or_next_to_it_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize("field", [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}])
def test_each_penalty_counts_as_one(field: dict[str, float]) -> None:
    assert SamplingParams(**field).has_penalties  # type: ignore[arg-type]


def test_what_the_caller_changes_afterwards_changes_no_parameters() -> None:
    stop, bias = ["END"], {3: -1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("MORE")
    bias[4] = 2.0
    assert params.stop == ("END",)
    assert params.logit_bias == {3: -1.0}


def test_a_bias_of_minus_infinity_is_allowed() -> None:
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}
