"""Differences between ways of serving, against numbers worked out by hand."""

import numpy as np
import pytest
from evaluate_drafter import report
from training.acceptance import Acceptance
from training.comparison import compare, resampled_lengths, sign_test, standard_error


def counts(*steps: int, tokens: int = 12) -> list[Acceptance]:
    return [Acceptance(tokens, count, 1, 1, proposed=3 * count) for count in steps]


def test_ours_taking_more_on_every_prompt_is_surely_better() -> None:
    found = compare(counts(6, 6, 6, 6), counts(12, 12, 12, 12))
    assert (found.difference, found.low, found.high) == (1.0, 1.0, 1.0)
    assert (found.better, found.worse) == (4, 0)
    assert found.p_value == pytest.approx(2 / 16)


def test_equal_prompts_speak_for_neither() -> None:
    found = compare(counts(6, 6, 12), counts(6, 12, 6))
    assert (found.difference, found.better, found.worse, found.p_value) == (0.0, 1, 1, 1.0)
    assert found.low < 0 < found.high


def test_the_difference_is_one_of_pooled_lengths_and_not_a_mean_over_prompts() -> None:
    found = compare(counts(4, 12), counts(12, 12))
    assert found.difference == pytest.approx(24 / 16 - 1)


def test_the_sign_test_is_the_two_sided_binomial_one() -> None:
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_test(2, 8) == sign_test(8, 2)
    assert sign_test(0, 0) == 1.0


def test_the_standard_error_is_the_known_one_where_prompts_weigh_the_same() -> None:
    """With one step each the length is a plain mean, whose standard error is the deviation by the root of the number."""
    each = [Acceptance(tokens, 1, 1, 1) for tokens in (1, 2, 3, 4) * 25]
    assert standard_error(each) == pytest.approx(np.sqrt(1.25) / 10, rel=0.03)


def test_resampling_draws_the_same_prompts_for_both() -> None:
    assert np.array_equal(resampled_lengths(counts(6, 12, 4)), resampled_lengths(counts(6, 12, 4)))
    assert np.allclose(resampled_lengths(counts(6, 12, 4)), 2 * resampled_lengths(counts(12, 24, 8)))


def test_drafters_are_reported_one_by_one_and_together() -> None:
    lines = list(
        report(
            {
                ("as trained", "a"): counts(6, 6),
                ("untrained", "a"): counts(12, 12),
                ("as trained", "b"): counts(4, 8),
                ("untrained", "b"): counts(12, 12),
            }
        )
    )
    assert [line.split(" +- ")[0].split(" (")[0] for line in lines] == [
        "a as trained: acceptance length 2.000",
        "b as trained: acceptance length 2.000",
        "all 2 as trained: acceptance length 2.000",
        "a untrained: acceptance length 1.000",
        "b untrained: acceptance length 1.000",
        "all 2 untrained: acceptance length 1.000",
        "a as trained less untrained: +1.000",
        "b as trained less untrained: +1.000",
        "all 2 as trained less untrained: +1.000",
    ]
    # Of two prompts with 12 tokens each, in 4 and 8 steps: 3.0 and 1.5 each in a quarter of the draws, 2.0 in half of them.
    assert float(lines[1].split(" +- ")[1].split()[0]) == pytest.approx(0.545, rel=0.03)
    assert lines[0].split(" tokens per step ")[1] == (
        "(24 tokens in 12 steps), acceptance rate 0.333 (12 of 36 draft tokens), output equal to plain greedy 2 of 2 times"
    )
    assert "acceptance rate 0.000 (0 of 72 draft tokens)" in lines[3]
    assert "more on 2 prompts, less on 0, sign test p = 0.5" in lines[6]
