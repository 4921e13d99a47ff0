"""Rows that no trainer should read, found on the device."""

import torch

from hiddentap.capture.run.engines.row_check import ALL_ZERO, NOT_FINITE, OK, OVERFLOW, fault_codes


def test_each_kind_of_fault_is_told_at_its_row_and_tap() -> None:
    rows = torch.ones(5, 2, 3, dtype=torch.bfloat16)
    rows[1, 0, 2] = torch.inf
    rows[2, 1, 0] = torch.nan
    rows[3, 1] = 0.0
    rows[4, 0, 1] = 1e5
    codes = fault_codes(rows, rows.to(torch.float16), zero_is_fault=True)
    assert codes.tolist() == [[OK, OK], [NOT_FINITE, OK], [OK, NOT_FINITE], [OK, ALL_ZERO], [OVERFLOW, OK]]


def test_zero_rows_of_the_embeddings_are_no_fault() -> None:
    rows = torch.zeros(1, 2, 3)
    assert fault_codes(rows, rows, zero_is_fault=torch.tensor([False, True])).tolist() == [[OK, ALL_ZERO]]


def test_a_row_of_minus_zero_is_zero_and_a_tiny_one_is_not() -> None:
    rows = torch.tensor([[[-0.0, 0.0]], [[0.0, 1e-30]]])
    assert fault_codes(rows, rows, zero_is_fault=True).tolist() == [[ALL_ZERO], [OK]]
