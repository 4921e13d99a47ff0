"""Batches of a planned shard."""

import numpy as np
import pytest
import torch

from hiddentap.capture.run.batches import BatchRule, ImageInputs, Place, SampleRows
from hiddentap.models.length_limits import LengthLimits


def rows_of(lengths: list[int], images: ImageInputs | None = None) -> SampleRows:
    ids = torch.arange(sum(lengths), dtype=torch.int32)
    return SampleRows([f"s{i}" for i in range(len(lengths))], np.cumsum([0, *lengths]), ids, images)


PLAIN = BatchRule()


def cut(
    lengths: list[int], budget: int, rule: BatchRule = PLAIN, images: ImageInputs | None = None
) -> list[tuple[int, int]]:
    samples, first, batches = rows_of(lengths, images), 0, []
    while first < samples.M:
        stop = samples.batch(Place(first), budget, rule).samples.stop
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


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ((), [(0, 5)]),
        ((10,), [(0, 3), (3, 5)]),  # a sample of just the limit is below it
        ((8,), [(0, 1), (1, 5)]),
        ((9, 10), [(0, 2), (2, 3), (3, 5)]),
        ((7, 12, 1000), [(0, 5)]),
    ],
)
def test_no_batch_straddles_a_length_limit(limits: tuple[int, ...], batches: list[tuple[int, int]]) -> None:
    assert cut([8, 9, 10, 11, 11], 1000, BatchRule(0.5, LengthLimits(tuple(sorted(limits))))) == batches


def test_no_batch_of_any_input_straddles_a_limit_and_none_is_lost_by_it() -> None:
    lengths, limits = sorted(np.random.default_rng(1).integers(1, 300, 500).tolist()), frozenset({64, 128, 200})
    batches = cut(lengths, 4096, BatchRule(1.0, LengthLimits(tuple(sorted(limits)))))
    assert [i for first, stop in batches for i in range(first, stop)] == list(range(500))
    for first, stop in batches:
        assert not any(lengths[first] <= limit < lengths[stop - 1] for limit in limits)


def test_a_sample_with_images_is_alone_in_its_batch() -> None:
    images = ImageInputs(np.array([0, 3]), lambda place: {"pixel_values": torch.tensor([place])})
    assert cut([4, 4, 4, 4, 4, 4], 1000, images=images) == [(0, 1), (1, 3), (3, 4), (4, 6)]
    samples = rows_of([4, 4, 4, 4, 4, 4], images)
    assert samples.batch(Place(3), 1000, PLAIN).inputs == {"pixel_values": torch.tensor([3])}
    assert samples.batch(Place(1), 1000, PLAIN).inputs is None


def test_a_batch_is_padded_on_the_right_and_knows_its_samples() -> None:
    samples = SampleRows("abc", np.array([0, 2, 4, 7]), torch.tensor([9, 8, 7, 6, 5, 4, 3], dtype=torch.int32))
    batch = samples.batch(Place(1), 6, BatchRule(0.2))
    assert batch.input_ids.tolist() == [[7, 6, 0], [5, 4, 3]]
    assert batch.input_ids.dtype == torch.int64
    assert (batch.positions.lengths, list(batch.samples)) == ((2, 3), [1, 2])


def test_a_sample_past_the_selection_budget_of_sparse_attention_is_alone_in_its_forward() -> None:
    rule = BatchRule(1.0, LengthLimits(selects_past=8))
    assert cut([6, 7, 8, 9, 9, 10], 1000, rule) == [(0, 3), (3, 4), (4, 5), (5, 6)]


def test_a_sample_longer_than_a_chunk_is_alone_and_cut_into_chunks() -> None:
    samples, place, batches = rows_of([3, 3, 10, 11]), Place(0), []
    while place.sample < samples.M:
        batch = samples.batch(place, 1000, BatchRule(chunk=5))
        batches.append((batch.first, batch.positions.lengths, batch.input_ids[0].tolist(), batch.ends_samples))
        place = batch.next
    assert batches == [
        (0, (3, 3), [0, 1, 2], True),
        (2, (5,), [6, 7, 8, 9, 10], False),
        (2, (5,), [11, 12, 13, 14, 15], True),
        (3, (5,), [16, 17, 18, 19, 20], False),
        (3, (5,), [21, 22, 23, 24, 25], False),
        (3, (1,), [26], True),
    ]


def test_samples_up_to_a_chunk_share_batches_and_none_is_cut() -> None:
    assert cut([4, 5, 5, 5], 1000, BatchRule(chunk=5)) == [(0, 4)]


def test_a_sample_with_images_is_whole_whatever_its_length() -> None:
    images = ImageInputs(np.array([0]), lambda place: {"pixel_values": torch.tensor([place])})
    batch = rows_of([20], images).batch(Place(0), 1000, BatchRule(chunk=5))
    assert (batch.chunk, batch.positions.lengths) == (None, (20,))
