"""Columns of lists: lengths beside one flat list of values."""

import pytest
import torch

from hiddentap.capture.outputs import RaggedRows


def ragged(lengths: list[int], values: list[int]) -> RaggedRows:
    return RaggedRows(torch.tensor(lengths, dtype=torch.int32), torch.tensor(values, dtype=torch.int32))


def test_no_list_an_empty_list_and_a_list_are_three_different_things() -> None:
    assert ragged([-1, 0, 2], [8, 9]).to_lists() == [None, [], [8, 9]]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 4, [[1, 2], None, [], [3]]), (1, 3, [None, []]), (3, 4, [[3]]), (0, 0, []), (2, 4, [[], [3]])],
)
def test_consecutive_rows_are_taken_with_their_values(begin: int, end: int, expected: list[list[int] | None]) -> None:
    rows = ragged([2, -1, 0, 1], [1, 2, 3])[begin:end]
    assert rows.to_lists() == expected
    assert len(rows) == end - begin


def test_concatenation_keeps_the_order_of_rows_and_values() -> None:
    whole = RaggedRows.concatenate([ragged([1, -1], [4]), ragged([], []), ragged([2], [5, 6])])
    assert whole.to_lists() == [[4], None, [5, 6]]


def test_a_clone_has_memory_of_its_own() -> None:
    rows = ragged([1], [4])
    copy = rows.clone()
    rows.values.zero_()
    rows.lengths.zero_()
    assert copy.to_lists() == [[4]]


@pytest.mark.parametrize("values", [[], [1, 2, 3]])
def test_values_that_do_not_match_the_lengths_are_refused(values: list[int]) -> None:
    with pytest.raises(ValueError, match=r"as many values as they add up to \(2\)"):
        ragged([2, -1], values)
