"""Rows of one request in memory: contiguous per column, in memory of their own."""

import pytest
import torch

from hiddentap.capture.outputs import RaggedRows, RowBuffer


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_appended_in_chunks_become_one_column() -> None:
    buffer = RowBuffer()
    buffer.append(0, {"h": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    buffer.append(2, {"h": torch.tensor([[5.0, 6.0]])})
    assert buffer.columns()["h"].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert buffer.next_position("h") == 3


def test_several_outputs_append_their_own_columns_for_the_same_positions() -> None:
    buffer = RowBuffer(starts={"output_ids": 2})
    buffer.append(0, {"input_ids": column(10, 11, 12)})
    buffer.append(2, {"output_ids": column(7)})
    buffer.append(3, {"input_ids": column(7)})
    buffer.append(3, {"output_ids": column(8)})
    assert {name: value.tolist() for name, value in buffer.columns().items()} == {
        "input_ids": [10, 11, 12, 7],
        "output_ids": [7, 8],
    }


def test_a_gap_is_refused_and_names_the_missing_rows() -> None:
    with pytest.raises(ValueError, match=r"rows 0\.\.3 of 'h' are missing"):
        RowBuffer().append(4, {"h": column(1)})


def test_a_gap_after_some_rows_names_the_missing_rows() -> None:
    buffer = RowBuffer()
    buffer.append(0, {"h": column(1, 2)})
    with pytest.raises(ValueError, match=r"rows 2\.\.4 of 'h' are missing: the next row due is 2, found rows from 5"):
        buffer.append(5, {"h": column(1)})


def test_an_overlap_is_refused_and_names_the_rows() -> None:
    buffer = RowBuffer()
    buffer.append(0, {"h": column(1, 2, 3)})
    with pytest.raises(ValueError, match=r"rows 1\.\.2 of 'h' overlap: the next row due is 3"):
        buffer.append(1, {"h": column(1, 2)})


def test_a_column_with_a_later_start_must_begin_there() -> None:
    with pytest.raises(ValueError, match=r"rows 2\.\.2 of 'output_ids' are missing"):
        RowBuffer(starts={"output_ids": 2}).append(3, {"output_ids": column(1)})
    with pytest.raises(ValueError, match=r"rows 0\.\.0 of 'output_ids' overlap"):
        RowBuffer(starts={"output_ids": 2}).append(0, {"output_ids": column(1)})


def test_a_refused_append_leaves_every_column_as_it_was() -> None:
    buffer = RowBuffer()
    buffer.append(0, {"a": column(1)})
    with pytest.raises(ValueError, match="missing"):
        buffer.append(1, {"a": column(2), "b": column(2)})
    assert buffer.columns()["a"].tolist() == [1]
    assert list(buffer.columns()) == ["a"]


def test_columns_appended_together_need_equal_row_counts() -> None:
    with pytest.raises(ValueError, match=r"same number of rows; found \{'a': 1, 'b': 2\}"):
        RowBuffer().append(0, {"a": column(1), "b": column(1, 2)})


@pytest.mark.parametrize(
    ("later", "found"),
    [
        (torch.zeros(1, 3), r"found torch.float32 rows of shape \(3,\)"),
        (torch.zeros(1, 2, dtype=torch.float64), r"found torch.float64 rows of shape \(2,\)"),
        (RaggedRows(column(1), column(1)), "found lists of torch.int32"),
    ],
)
def test_a_change_of_shape_or_dtype_is_refused(later: torch.Tensor, found: str) -> None:
    buffer = RowBuffer()
    buffer.append(0, {"h": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=rf"expected torch.float32 rows of shape \(2,\), {found}"):
        buffer.append(1, {"h": later})


def test_rows_are_copied_so_that_the_callers_tensor_may_be_used_again() -> None:
    buffer = RowBuffer()
    tensor = torch.tensor([1.0, 2.0, 3.0])
    buffer.append(0, {"h": tensor[:2]})
    tensor.zero_()
    assert buffer.columns()["h"].tolist() == [1.0, 2.0]


def test_ragged_columns_are_kept_apart_from_dense_ones() -> None:
    buffer = RowBuffer()
    buffer.append(0, {"masks": RaggedRows(column(2, -1), column(5, 6)), "h": column(1, 2)})
    buffer.append(2, {"masks": RaggedRows(column(0, 1), column(9))})
    assert list(buffer.columns()) == ["h"]
    masks = buffer.ragged_columns()["masks"]
    assert masks.lengths.tolist() == [2, -1, 0, 1]
    assert masks.to_lists() == [[5, 6], None, [], [9]]
