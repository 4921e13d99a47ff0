"""How rows are measured and samples are chosen, on numbers that can be checked by eye."""

from pathlib import Path

import pytest
import torch

from hiddentap.capture.verify.chosen import chosen_places
from hiddentap.capture.verify.declared import State
from hiddentap.capture.verify.matching import Match, closest_other, differing_rows, is_better, match_of, row_errors
from hiddentap.capture.verify.rounding import exceeds_rounding, lost_rows
from support.shards import write_shard


def test_the_error_of_a_row_is_its_distance_in_lengths_of_the_true_row() -> None:
    rows = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [1.0, torch.nan], [1.0, 0.0]])
    truth = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert row_errors(rows, truth).tolist() == [0.0, 0.5, 0.0, torch.inf, torch.inf]


def test_equal_bits_are_equal_even_where_they_are_no_numbers_and_equal_numbers_need_not_be_equal_bits() -> None:
    rows, truth = torch.tensor([[torch.nan], [0.0], [2.0]]), torch.tensor([[torch.nan], [-0.0], [2.0]])
    assert differing_rows(rows, truth).tolist() == [False, True, False]
    assert row_errors(rows, truth).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_shift_compares_the_rows_that_both_sides_have(shift: int) -> None:
    truth = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    stored = truth.roll(-shift, 0)
    assert match_of(stored, State(2), truth, shift) == Match(State(2), shift, True, 0.0)
    assert not match_of(stored, State(2), truth, 1 if shift == 0 else 0).bit_equal


def test_the_declared_state_is_no_candidate_but_its_shifts_are() -> None:
    truth = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found = closest_other(truth.roll(1, 0), {State(1): truth}, State(1))
    assert (found.state, found.shift, found.bit_equal) == (State(1), -1, True)
    assert closest_other(truth[:1], {State(1): truth[:1]}, State(1)) is None


@pytest.mark.parametrize(
    ("match", "declared", "half", "better"),
    [
        ((True, 0.0), (False, 1e-4), False, True),
        ((True, 0.0), (True, 0.0), False, False),
        ((False, 9e-4), (False, 2e-3), False, True),
        ((False, 9e-4), (False, 9.5e-4), False, False),
        ((False, 0.02), (False, 0.2), False, False),
        ((False, 0.02), (False, 0.2), True, True),
        ((False, 0.02), (False, 0.03), True, False),
        ((False, 0.3), (False, 5.0), True, False),
    ],
)
def test_a_match_beats_the_declaration_only_where_it_is_one(match, declared, half: bool, better: bool) -> None:
    assert is_better(Match(State(1), 0, *match), Match(State(2), 0, *declared), half=half) is better


def test_errors_within_a_quarter_of_single_forwards_are_rounding() -> None:
    single = torch.linspace(0.01, 0.02, 5000, dtype=torch.float64)
    assert exceeds_rounding(single * 1.2, single) is None
    assert "median" in exceeds_rounding(single * 1.4, single)
    tail = single.clone()
    tail[-100:] = 0.05  # the farthest 2 %: the median does not see them
    assert "99% quantile" in exceeds_rounding(tail, single)


def test_few_rows_are_given_the_slack_of_their_number() -> None:
    single = torch.tensor([0.01, 0.012, 0.02, 0.03], dtype=torch.float64)
    assert exceeds_rounding(single.flip(0) * 1.2, single) is None
    assert exceeds_rounding(single * 4, single) is not None


def test_a_row_is_lost_where_rounding_moves_none_nearly_as_far() -> None:
    single = torch.tensor([0.01, 0.02, 0.01], dtype=torch.float64)
    assert lost_rows(torch.tensor([0.02, 0.6, torch.inf]), single).tolist() == [False, True, True]
    assert lost_rows(torch.tensor([0.02, 0.6, 0.4]), single * 10).tolist() == [False, False, False]


def test_chosen_samples_are_spread_over_all_shards_ends_included(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"shard-00000{i}.safetensors", *[2] * count) for i, count in enumerate((5, 1, 4))]

    def places(count: int, **fields: bool) -> list[tuple[int, int]]:
        return [(shards.index(shard), position) for shard, position in chosen_places(shards, count, **fields)]

    assert places(2, each_shard=False) == [(0, 0), (2, 3)]
    assert places(4, each_shard=False) == [(0, 0), (0, 3), (2, 0), (2, 3)]
    assert places(2, each_shard=True) == [(0, 0), (1, 0), (2, 3)]
    assert len(places(99, each_shard=False)) == 10
    assert places(0, each_shard=True) == []


@pytest.mark.parametrize("R", [60, 372])
def test_two_roundings_of_one_law_that_are_independent_are_no_fault(R: int) -> None:
    # Row errors of a real run have such a tail; another processor draws its own.
    generator = torch.Generator().manual_seed(R)
    draws = (torch.randn(2, 500, R, generator=generator) * 0.5).exp()
    faults = sum(exceeds_rounding(stored, single) is not None for stored, single in zip(*draws, strict=True))
    assert faults <= 10
