"""Where the rows of each request lie."""

import pytest
import torch

from hiddentap.capture.outputs import RowLayout
from support.fake_requests import FakeRequest


def test_rows_lie_one_request_after_the_other_unless_starts_are_given() -> None:
    layout = RowLayout(row_counts=(3, 0, 2), first_positions=(0, 5, 7), prompt_counts=(3, 0, 0))
    assert layout.starts == (0, 3, 3)


def test_prompt_rows_begin_at_position_zero_unless_positions_are_given() -> None:
    assert RowLayout.of_prompts([2, 3]) == RowLayout((2, 3), (0, 0), (2, 3))
    assert RowLayout.of_prompts([2, 3], [4, 0]) == RowLayout((2, 3), (4, 0), (2, 3))


def test_a_verify_step_has_its_rows_at_a_fixed_stride_and_no_prompt_rows() -> None:
    layout = RowLayout.of_verify_step(5, [1, 5, 3], [9, 8, 7])
    assert layout.starts == (0, 5, 10)
    assert layout.row_counts == (1, 5, 3)
    assert layout.prompt_counts == (0, 0, 0)


@pytest.mark.parametrize("stride", [None, 0, -4])
def test_a_verify_step_without_a_positive_stride_is_refused(stride: int | None) -> None:
    with pytest.raises(RuntimeError, match=r"^speculative result is missing a positive output row stride"):
        RowLayout.of_verify_step(stride, [1], [0])


def test_a_verify_step_that_accepts_more_rows_than_its_stride_is_refused() -> None:
    with pytest.raises(RuntimeError, match="request 1 accepted 4 rows of a step that has 3"):
        RowLayout.of_verify_step(3, [3, 4], [0, 0])


@pytest.mark.parametrize(
    "lengths",
    [((1, 1), (0,), (1, 1), None), ((1,), (0,), (1, 1), None), ((1,), (0,), (1,), (0, 1)), ((), (0,), (), None)],
)
def test_fields_of_different_lengths_are_refused(lengths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="one row count, first position, prompt count and row start per request"):
        RowLayout(*lengths)


@pytest.mark.parametrize(("count", "position", "prompt"), [(-1, 0, 0), (2, -1, 0), (2, 0, 3), (2, 0, -1)])
def test_impossible_numbers_are_refused_and_name_the_request(count: int, position: int, prompt: int) -> None:
    with pytest.raises(ValueError, match=r"^request 1 has"):
        RowLayout((1, count), (0, position), (0, prompt))


def test_overlapping_row_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="request 1 begins at row 2, inside the rows before it, which end at 3"):
        RowLayout((3, 1), (0, 0), (0, 0), row_starts=(0, 2))


@pytest.mark.parametrize(("rows", "fits"), [(3, False), (4, True), (5, False)])
def test_a_column_has_exactly_the_rows_of_all_requests(rows: int, fits: bool) -> None:
    layout = RowLayout.of_prompts([1, 3])
    if fits:
        layout.check_column("x", torch.zeros(rows, 2))
    else:
        with pytest.raises(ValueError, match=f"'x' needs 4 rows.*found {rows}"):
            layout.check_column("x", torch.zeros(rows, 2))


def test_a_column_with_a_stride_may_have_rows_that_nobody_owns_at_its_end() -> None:
    layout = RowLayout.of_verify_step(4, [1, 2], [0, 0])
    layout.check_column("x", torch.zeros(8, 2))
    layout.check_column("x", torch.zeros(6, 2))
    with pytest.raises(ValueError, match="needs 6 rows"):
        layout.check_column("x", torch.zeros(5, 2))


def test_a_scalar_is_no_column() -> None:
    with pytest.raises(ValueError, match=r"needs 1 rows.*found 0"):
        RowLayout.of_prompts([1]).check_column("x", torch.tensor(1.0))


class Ranged:
    """A batch that takes a step's rows as one range, and notes how rows came to it."""

    def __init__(self, *requests: FakeRequest) -> None:
        self.reqs, self.ranges = requests, []

    def append_all(self, rows: dict[str, torch.Tensor]) -> None:
        self.ranges.append(rows["x"].tolist())


def test_the_rows_of_a_step_come_as_one_range_where_all_are_kept_and_the_batch_takes_that() -> None:
    batch = Ranged(FakeRequest("a"), FakeRequest("b"))
    RowLayout.of_prompts([2, 1]).append_kept({"x": torch.tensor([7, 8, 9])}, batch, [None, None])
    assert batch.ranges == [[7, 8, 9]]
    assert [request.rows.appends for request in batch.reqs] == [[], []]


@pytest.mark.parametrize(
    ("layout", "aborted", "expected"),
    [
        (RowLayout.of_prompts([2, 1]), True, [[(0, [7, 8])], []]),
        (RowLayout.of_prompts([2, 1], [0, 4]), False, [[(0, [7, 8])], [(4, [9])]]),
        (RowLayout((1, 1), (0, 0), (1, 1), row_starts=(0, 2)), False, [[(0, [7])], [(0, [9])]]),
        (RowLayout((2, 1), (0, 0), (1, 1)), False, [[(0, [7])], [(0, [9])]]),
    ],
    ids=["one aborted", "from a later position", "with rows between them", "one not committed"],
)
def test_otherwise_each_request_gets_its_own(layout: RowLayout, aborted: bool, expected: list[object]) -> None:
    batch = Ranged(FakeRequest("a"), FakeRequest("b", aborted=aborted))
    layout.append_kept({"x": torch.tensor([7, 8, 9])}, batch, [None, None])
    assert batch.ranges == []
    assert [[(at, rows["x"]) for at, rows in request.rows.appends] for request in batch.reqs] == expected
