"""Batches of a planned shard."""

import numpy as np
import torch

from hiddentap.capture.run.batches import batch_end, token_batch


def cut(lengths: list[int], budget: int) -> list[tuple[int, int]]:
    array, first, batches = np.array(lengths), 0, []
    while first < len(lengths):
        stop = batch_end(array, first, budget)
        batches.append((first, stop))
        first = stop
    return batches


def test_a_batch_holds_as_many_equal_samples_as_its_budget_has_positions() -> None:
    assert cut([4, 4, 4, 4, 4], 12) == [(0, 3), (3, 5)]


def test_a_sample_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    assert cut([5, 100, 100], 12) == [(0, 1), (1, 2), (2, 3)]


def test_a_batch_ends_before_an_eighth_of_it_would_be_padding() -> None:
    # 8+8+9: 2 of 27 positions are padding; 8+8+9+16 would be 23 of 64.
    assert cut([8, 8, 9, 16], 1000) == [(0, 3), (3, 4)]


def test_every_sample_is_in_one_batch_and_no_batch_is_over_its_budget() -> None:
    lengths = sorted(np.random.default_rng(0).integers(1, 300, 500).tolist())
    batches = cut(lengths, 512)
    assert [i for first, stop in batches for i in range(first, stop)] == list(range(500))
    assert all((stop - first) * lengths[stop - 1] <= 512 or stop - first == 1 for first, stop in batches)


def test_a_batch_is_padded_on_the_right_and_knows_its_rows() -> None:
    offsets = np.array([0, 2, 4, 7])
    batch = token_batch(1, 3, offsets, torch.tensor([9, 8, 7, 6, 5, 4, 3], dtype=torch.int32))
    assert batch.input_ids.tolist() == [[7, 6, 0], [5, 4, 3]]
    assert batch.input_ids.dtype == torch.int64
    assert (batch.row_start, batch.positions.lengths, list(batch.samples)) == (2, (2, 3), [1, 2])
