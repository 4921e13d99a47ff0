"""Hidden states as an auxiliary output: copied once, consumed once, rows kept by what was committed."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import (
    CommittedTokens,
    DeviceAuxiliaryOutput,
    DeviceHiddenStates,
    HostAuxiliaryOutput,
    HostHiddenStates,
    RowBuffer,
    RowLayout,
)
from support.fake_requests import FakeBatch, FakeRequest


def rows(count: int) -> Tensor:
    """(count, 1, 1) float32: row t holds the number t."""
    return torch.arange(count, dtype=torch.float32).view(count, 1, 1)


def requests(count: int) -> list[FakeRequest]:
    return [FakeRequest(rid=f"r{index}") for index in range(count)]


def kept(request: FakeRequest) -> list[tuple[int, list[object]]]:
    """(first position, numbers of the kept rows) of every append."""
    return [(first, [value[0][0] for value in columns["aux_hidden_states"]]) for first, columns in request.rows.appends]


def test_they_are_auxiliary_outputs() -> None:
    device = DeviceHiddenStates({"aux_hidden_states": rows(2)}, RowLayout.of_prompts([2]))
    assert isinstance(device, DeviceAuxiliaryOutput)
    assert isinstance(device.copy_to_host(lambda tensor: tensor), HostAuxiliaryOutput)


def test_every_tensor_is_copied_exactly_once_for_the_whole_batch_in_the_order_of_the_columns() -> None:
    columns = {
        "aux_hidden_states": torch.zeros(5, 2, 4),
        "pre_norm": torch.zeros(5, 4),
        "input_ids": torch.zeros(5, dtype=torch.int32),
    }
    copied: list[Tensor] = []

    def copy_tensor(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return tensor.clone()

    host = DeviceHiddenStates(columns, RowLayout.of_prompts([2, 0, 3])).copy_to_host(copy_tensor)
    assert len(copied) == 3
    assert all(seen is column for seen, column in zip(copied, columns.values(), strict=True))
    assert list(host.columns) == ["aux_hidden_states", "pre_norm", "input_ids"]
    assert host.columns["aux_hidden_states"].data_ptr() != columns["aux_hidden_states"].data_ptr()


def test_the_device_tensors_are_dropped_with_the_copy() -> None:
    tensor = torch.zeros(3, 1, 2)
    seen = weakref.ref(tensor)
    device = DeviceHiddenStates({"aux_hidden_states": tensor}, RowLayout.of_prompts([3]))
    del tensor
    assert seen() is not None
    host = device.copy_to_host(torch.clone)
    gc.collect()
    assert seen() is None
    assert host.columns["aux_hidden_states"].shape == (3, 1, 2)


def test_the_host_tensors_are_dropped_once_consumed() -> None:
    tensor = torch.zeros(1, 1, 2)
    seen = weakref.ref(tensor)
    host = HostHiddenStates({"aux_hidden_states": tensor}, RowLayout.of_prompts([1]))
    del tensor
    host.consume(FakeBatch(requests(1)), [None])
    gc.collect()
    assert seen() is None


def test_a_second_copy_is_refused_and_so_is_reading_the_device_tensors_after_the_first() -> None:
    device = DeviceHiddenStates({"aux_hidden_states": rows(1)}, RowLayout.of_prompts([1]))
    assert torch.equal(device.aux_hidden_states, rows(1))
    device.copy_to_host(torch.clone)
    with pytest.raises(RuntimeError, match="copied to the host already"):
        device.copy_to_host(torch.clone)
    with pytest.raises(RuntimeError, match="copied to the host already"):
        _ = device.aux_hidden_states


def test_a_second_consume_is_refused_and_appends_nothing() -> None:
    host = HostHiddenStates({"aux_hidden_states": rows(2)}, RowLayout.of_prompts([2]))
    batch = FakeBatch(requests(1))
    host.consume(batch, [None])
    with pytest.raises(RuntimeError, match="consumed already"):
        host.consume(batch, [None])
    assert kept(batch.reqs[0]) == [(0, [0.0, 1.0])]


def test_prompt_rows_are_kept_whatever_the_commit_says() -> None:
    batch = FakeBatch(requests(3))
    host = HostHiddenStates({"aux_hidden_states": rows(10)}, RowLayout.of_prompts([3, 5, 2]))
    host.consume(batch, [None, CommittedTokens(0, (7,)), CommittedTokens(0, ())])
    assert kept(batch.reqs[0]) == [(0, [0.0, 1.0, 2.0])]
    assert kept(batch.reqs[1]) == [(0, [3.0, 4.0, 5.0, 6.0, 7.0])]
    assert kept(batch.reqs[2]) == [(0, [8.0, 9.0])]


def test_of_the_other_rows_the_first_committed_ones_are_kept() -> None:
    layout = RowLayout(row_counts=(3, 3, 3), first_positions=(10, 20, 30), prompt_counts=(0, 0, 0))
    batch = FakeBatch(requests(3))
    HostHiddenStates({"aux_hidden_states": rows(9)}, layout).consume(
        batch, [CommittedTokens(4, (1, 2)), None, CommittedTokens(0, (1, 2, 3))]
    )
    assert [kept(request) for request in batch.reqs] == [[(10, [0.0, 1.0])], [], [(30, [6.0, 7.0, 8.0])]]


def test_rows_of_a_request_that_are_prompt_first_and_sampled_after_follow_both_rules() -> None:
    layout = RowLayout(row_counts=(5, 5), first_positions=(8, 8), prompt_counts=(2, 2))
    batch = FakeBatch(requests(2))
    HostHiddenStates({"aux_hidden_states": rows(10)}, layout).consume(batch, [CommittedTokens(0, (4,)), None])
    assert kept(batch.reqs[0]) == [(8, [0.0, 1.0, 2.0])]
    assert kept(batch.reqs[1]) == [(8, [5.0, 6.0])]


def test_an_aborted_request_keeps_no_row_not_even_prompt_rows() -> None:
    batch = FakeBatch([FakeRequest(aborted=True), FakeRequest()])
    host = HostHiddenStates({"aux_hidden_states": rows(4)}, RowLayout.of_prompts([2, 2]))
    host.consume(batch, [CommittedTokens(0, (1,)), None])
    assert kept(batch.reqs[0]) == []
    assert kept(batch.reqs[1]) == [(0, [2.0, 3.0])]


def test_a_request_without_rows_gets_no_append() -> None:
    batch = FakeBatch(requests(2))
    host = HostHiddenStates({"aux_hidden_states": rows(1)}, RowLayout.of_prompts([0, 1]))
    host.consume(batch, [CommittedTokens(3, (1,)), None])
    assert kept(batch.reqs[0]) == []
    assert kept(batch.reqs[1]) == [(0, [0.0])]


@dataclass
class VerifyCase:
    """One request of a verify step of stride 4: request 1 of 3, so it owns rows 4..7, from position 20 on."""

    accepted: int
    commit: CommittedTokens | None
    aborted: bool
    expected: list[tuple[int, list[object]]]


@pytest.mark.parametrize(
    "case",
    [
        VerifyCase(4, CommittedTokens(5, (1, 2, 3, 4)), False, [(20, [4.0, 5.0, 6.0, 7.0])]),
        VerifyCase(2, CommittedTokens(5, (1, 2)), False, [(20, [4.0, 5.0])]),
        VerifyCase(1, CommittedTokens(5, (1,)), False, [(20, [4.0])]),
        VerifyCase(4, CommittedTokens(5, (1, 2)), False, [(20, [4.0, 5.0])]),
        VerifyCase(3, None, False, []),
        VerifyCase(3, CommittedTokens(5, (1, 2, 3)), True, []),
        VerifyCase(0, None, False, []),
    ],
    ids=[
        "all accepted",
        "run of two",
        "only the bonus token",
        "stop inside the run",
        "had finished",
        "aborted",
        "none",
    ],
)
def test_a_verify_step_keeps_only_rows_of_committed_tokens_at_its_stride(case: VerifyCase) -> None:
    layout = RowLayout.of_verify_step(4, [1, case.accepted, 2], [10, 20, 30])
    batch = FakeBatch([FakeRequest(), FakeRequest(aborted=case.aborted), FakeRequest()])
    commits = [CommittedTokens(0, (9,)), case.commit, CommittedTokens(0, (8, 7))]
    HostHiddenStates({"aux_hidden_states": rows(12)}, layout).consume(batch, commits)
    assert kept(batch.reqs[0]) == [(10, [0.0])]
    assert kept(batch.reqs[1]) == case.expected
    assert kept(batch.reqs[2]) == [(30, [8.0, 9.0])]


@pytest.mark.parametrize(("request_count", "commit_count"), [(1, 2), (2, 1), (3, 3), (0, 0)])
def test_requests_commits_and_rows_must_agree_in_number(request_count: int, commit_count: int) -> None:
    host = HostHiddenStates({"aux_hidden_states": rows(2)}, RowLayout.of_prompts([1, 1]))
    batch = FakeBatch(requests(request_count))
    with pytest.raises(ValueError, match=f"2 entries, {request_count} requests and {commit_count} commits"):
        host.consume(batch, [None] * commit_count)
    assert all(not request.rows.appends for request in batch.reqs)


def test_a_column_with_another_number_of_rows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'pre_norm' needs 3 rows.*found 4"):
        DeviceHiddenStates({"aux_hidden_states": rows(3), "pre_norm": torch.zeros(4, 2)}, RowLayout.of_prompts([1, 2]))


def test_slices_of_one_batch_tensor_become_rows_with_memory_of_their_own() -> None:
    batch_tensor = torch.arange(20, dtype=torch.float32).view(10, 2)
    sinks = [RowBuffer(), RowBuffer(), RowBuffer()]
    batch = FakeBatch([FakeRequest(rows=sink) for sink in sinks])  # type: ignore[arg-type]
    columns = {"left": batch_tensor[:, :1], "right": batch_tensor[:, 1:]}
    host = DeviceHiddenStates(columns, RowLayout.of_prompts([3, 5, 2])).copy_to_host(torch.clone)
    batch_tensor.fill_(-1.0)
    host.consume(batch, [None] * 3)
    assert [sink.columns()["left"].flatten().tolist() for sink in sinks] == [
        [0.0, 2.0, 4.0],
        [6.0, 8.0, 10.0, 12.0, 14.0],
        [16.0, 18.0],
    ]
    tensors = [column for sink in sinks for column in sink.columns().values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 6
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [12, 12, 20, 20, 8, 8]


def test_a_prompt_and_its_decode_steps_give_one_row_per_position_but_the_last_sampled() -> None:
    sink = RowBuffer()
    request = FakeRequest(rows=sink)  # type: ignore[arg-type]
    batch = FakeBatch([request])
    steps = [
        (RowLayout.of_prompts([3]), [100, 101, 102], CommittedTokens(0, (7,))),
        (RowLayout((1,), (3,), (0,)), [7], CommittedTokens(1, (8,))),
        (RowLayout((1,), (4,), (0,)), [8], None),
    ]
    for layout, ids, commit in steps:
        HostHiddenStates({"input_ids": torch.tensor(ids, dtype=torch.int32)}, layout).consume(batch, [commit])
    assert sink.columns()["input_ids"].tolist() == [100, 101, 102, 7]
