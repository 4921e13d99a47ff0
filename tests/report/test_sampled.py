"""What is said of sampling supports and log-probabilities, and of shards' times."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddentap.capture.report import notices, survey
from hiddentap.capture.report.sampled import top_differences

NAN = float("nan")


def _generated(columns, number: int) -> None:
    """Rows 0..S-4 of the prompt, then supports 1, 2 and 0 (unknown), with log-probabilities that agree."""
    S = len(columns["input_ids"])
    columns["output_ids"] = torch.full((S,), -1, dtype=torch.int32)
    columns["output_ids"][-3:] = torch.tensor([4, 7, 9])
    columns["sampling_mask_lengths"] = torch.full((S,), -1, dtype=torch.int32)
    columns["sampling_mask_lengths"][-3:] = torch.tensor([1, 2, 64])
    columns["sampling_mask_ids"] = torch.arange(67, dtype=torch.int32)
    columns["sampling_logprobs"] = torch.full((S,), NAN)
    columns["sampling_logprobs"][-3:] = torch.tensor([0.0, -0.5, -3.0])
    columns["logprobs"] = torch.full((S,), NAN)
    columns["logprobs"][-3:] = torch.tensor([-0.25, -1.0, -3.5])
    columns["topk_ids"] = torch.full((S, 2), -1, dtype=torch.int32)
    columns["topk_ids"][-3:] = torch.tensor([[4, 1], [1, 7], [1, 2]])
    columns["topk_logits"] = torch.full((S, 2), NAN)
    columns["topk_logits"][-3:] = torch.tensor([[9.75, 8.25], [9.5, 9.0], [9.75, 7.5]])
    columns["topk_logsumexp"] = torch.full((S,), NAN)
    columns["topk_logsumexp"][-3:] = 10.0


def test_recorded_rows_are_gathered_and_rows_without_are_left_out(make_folder) -> None:
    seen = survey(make_folder(_generated))
    assert notices(seen) == []
    sampled = seen.sampled
    np.testing.assert_array_equal(sampled.supports, [1, 2, 64] * 12)
    np.testing.assert_allclose(sampled.of_model, [-0.25, -1.0, -3.5] * 12)
    np.testing.assert_allclose(sampled.of_sampler, [0.0, -0.5, -3.0] * 12)
    # The third token is not among the two stored logits of its row.
    np.testing.assert_array_equal(sampled.top_differences, [0.0, 0.0] * 12)


def test_top_logits_that_hold_little_of_the_distribution_are_found(make_folder) -> None:
    def little(columns, number: int) -> None:
        _generated(columns, number)
        # e^-0.25 + e^-9, e^-0.5 + e^-1 and e^-1 + e^-2: 0.779, 0.974 and 0.503.
        columns["topk_logits"][-3:] = torch.tensor([[9.75, 1.0], [9.5, 9.0], [9.0, 8.0]])

    ((weight, found),) = [(notice.weight, notice.found) for notice in notices(survey(make_folder(little)))]
    assert (weight, found) == ("look", "The stored top logits hold 75.2% of the probability, on average.")


def test_an_offline_capture_has_no_such_rows(make_folder) -> None:
    assert survey(make_folder()).sampled is None


def test_the_difference_to_the_stored_logits_is_worked_out_row_by_row() -> None:
    columns = {
        "output_ids": torch.tensor([-1, 5, 6], dtype=torch.int32),
        "topk_ids": torch.tensor([[-1, -1], [3, 5], [1, 2]], dtype=torch.int32),
        "topk_logits": torch.tensor([[NAN, NAN], [4.0, 3.0], [2.0, 1.0]]),
        "topk_logsumexp": torch.tensor([NAN, 5.0, 5.0]),
        "logprobs": torch.tensor([NAN, -2.5, -1.0]),
    }
    np.testing.assert_array_equal(top_differences(columns), [NAN, 0.5, NAN])


def _above_zero(columns, number: int) -> None:
    _generated(columns, number)
    if number == 3:
        columns["sampling_logprobs"][-1] = 0.25


def _unsure(columns, number: int) -> None:
    _generated(columns, number)
    if number == 3:
        columns["sampling_logprobs"][-3] = -0.75


def _shifted(columns, number: int) -> None:
    _generated(columns, number)
    if number == 3:
        columns["logprobs"][-3:] = torch.tensor([-1.0, -3.5, -0.25])


def _unknown(columns, number: int) -> None:
    _generated(columns, number)
    columns["sampling_mask_lengths"][-1] = 0
    columns["sampling_mask_ids"] = torch.arange(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("spoil", "weight", "text"),
    [
        (_above_zero, "wrong", "1 log-probabilities are above 0, and 0 tokens that were the only choice"),
        (_unsure, "wrong", "0 log-probabilities are above 0, and 1 tokens that were the only choice"),
        (_shifted, "wrong", "2 of 24 (8.3 %) log-probabilities differ by more than 0.01"),
        (_unknown, "look", "12 of 36 (33.3 %) sampled rows have no sampling support."),
    ],
)
def test_records_that_contradict_each_other_are_found(make_folder, spoil, weight: str, text: str) -> None:
    ((found_weight, found),) = [(notice.weight, notice.found) for notice in notices(survey(make_folder(spoil)))]
    assert (found_weight, found[: len(text)]) == (weight, text)


def _set_times(path: Path, *times: int) -> Path:
    for index, time in enumerate(times):
        os.utime(path / f"shards/shard-{index:06d}.safetensors", (time, time))
    return path


def test_rows_over_time_come_from_the_times_of_the_shards(make_folder) -> None:
    seals = survey(_set_times(make_folder(per_shard=4), 1_000_000, 1_000_060, 1_000_100)).seals
    # Four samples each: 74, 116 and 97 rows; when the first was begun is not known.
    assert seals.seconds.tolist() == [0, 60, 100]
    assert seals.rows.tolist() == [0, 116, 213]


def test_times_that_tell_nothing_are_left_out(make_folder) -> None:
    assert survey(_set_times(make_folder(per_shard=4), 1_000_000, 1_000_000, 1_000_000)).seals is None
    assert survey(_set_times(make_folder(per_shard=6, name="two"), 1_000_000, 1_000_900)).seals is None
