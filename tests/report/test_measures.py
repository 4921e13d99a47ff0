"""The numbers, against numpy and by hand on literal values."""

import math

import numpy as np
import pytest
import torch

from hiddentap.capture.report.dimensions import DimensionSums
from hiddentap.capture.report.measures import (
    equal_rows,
    group_medians,
    group_shares,
    mean_pair_cosine,
    percentiles,
    relative_sizes,
    repeats,
    row_cosines,
    row_norms,
)

ROWS = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, -1.0]])


def test_norms_are_lengths_of_rows_and_stay_finite_for_large_bfloat16() -> None:
    np.testing.assert_allclose(row_norms(ROWS), [5.0, 0.0, 2**0.5])
    large = torch.full((1, 4), 1e30, dtype=torch.bfloat16).float()
    np.testing.assert_allclose(row_norms(large), [2e30], rtol=1e-2)


def test_norms_of_rows_that_are_not_finite_are_not_finite() -> None:
    assert not np.isfinite(row_norms(torch.tensor([[math.nan, 1.0], [math.inf, 1.0]]))).any()


def test_cosines_are_row_by_row_and_nan_where_a_row_is_zero() -> None:
    other = torch.tensor([[4.0, 3.0], [1.0, 1.0], [-1.0, 1.0]])
    np.testing.assert_allclose(row_cosines(ROWS, other), [24 / 25, math.nan, -1.0])


def test_equal_rows_need_every_value_equal() -> None:
    assert equal_rows(ROWS, torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, -1.0]])).tolist() == [True, False, True]


def test_repeats_count_equal_neighbours_under_different_tokens_within_a_sample() -> None:
    rows = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 3.0]])
    ids = torch.tensor([5, 6, 6, 7, 8])
    # 5 -> 6 repeats; 6 -> 6 is the same token; 6 -> 7 begins a sample; the last row differs in one value.
    assert repeats(rows, ids, torch.tensor([True, False, False, True, False])) == 1
    assert repeats(rows, ids, torch.tensor([True, False, False, False, False])) == 2
    assert repeats(rows[:1], ids[:1], torch.tensor([True])) == 0


def test_percentiles_leave_out_what_is_not_finite() -> None:
    assert percentiles([4.0, math.nan, 1.0, 2.0, math.inf, 3.0], (0, 50, 100)) == (1.0, 2.5, 4.0)
    assert all(math.isnan(value) for value in percentiles([math.nan], (5, 95)))


def test_medians_and_shares_are_per_group_and_nan_for_an_empty_one() -> None:
    group = np.array([2, 0, 2, 0, 2])
    medians = group_medians(np.array([1.0, 10.0, 5.0, 20.0, 3.0]), group, 4)
    np.testing.assert_array_equal(medians, [15.0, math.nan, 3.0, math.nan])
    shares = group_shares(np.array([1, 0, 1, 1, 0], np.uint8), group, 4)
    np.testing.assert_allclose(shares, [0.5, math.nan, 2 / 3, math.nan])


def test_relative_sizes_compare_with_the_median_dimension() -> None:
    np.testing.assert_allclose(relative_sizes(np.array([2.0, 4.0, 40.0])), [0.5, 1.0, 10.0])
    assert np.isnan(relative_sizes(np.zeros(3))).all()


def test_the_mean_cosine_of_pairs_equals_the_one_counted_pair_by_pair() -> None:
    units = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    pairs = [units[0] @ units[1], units[0] @ units[2], units[1] @ units[2]]
    assert mean_pair_cosine(units.sum(0), 3) == pytest.approx(sum(pairs) / 3)
    assert math.isnan(mean_pair_cosine(units[0], 1))


def test_dimension_statistics_in_chunks_equal_numpy_on_the_whole() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32) * 3
    # A mean so far from zero that a difference of sums of squares in float32 would lose the variance.
    rows[:, 2] += 10_000
    rows[:, 4] = -7.0
    sums = DimensionSums(6)
    for start, stop in ((0, 1), (1, 1), (1, 20), (20, 50)):
        sums.add(torch.from_numpy(rows[start:stop]))
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(sums.variances(), exact.var(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sums.mean_abs(), np.abs(exact).mean(0), rtol=1e-12)
    assert sums.constant().tolist() == [4]
    units = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    cosines = units @ units.T
    assert sums.pair_cosine() == pytest.approx((cosines.sum() - 50) / (50 * 49), abs=1e-9)


def test_one_row_has_no_constant_dimensions() -> None:
    sums = DimensionSums(2)
    sums.add(torch.ones(1, 2))
    assert sums.constant().tolist() == []
