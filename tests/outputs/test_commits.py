"""Which tokens become visible in a step (visible lengths and commits)."""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch

from hiddentap.capture.outputs import CommittedTokens, HostHiddenStates, RowLayout, commits_of_step, visible_length
from support.fake_requests import FakeBatch, FakeRequest, RecordingSink


def test_committed_tokens_are_frozen_and_equal_values_hash_alike() -> None:
    commit = CommittedTokens(output_index=2, token_ids=(5, 6))
    assert {commit, CommittedTokens(2, (5, 6))} == {commit}
    with pytest.raises(dataclasses.FrozenInstanceError):
        commit.output_index = 3  # type: ignore[misc]


def test_visible_length_is_the_number_of_output_tokens_while_a_request_runs() -> None:
    assert visible_length(FakeRequest(output_ids=[4, 5, 6])) == 3


@pytest.mark.parametrize("finished_len", [0, 2, 3])
def test_visible_length_of_a_finished_request_is_its_finished_length(finished_len: int) -> None:
    assert visible_length(FakeRequest(output_ids=[4, 5, 6], finished_len=finished_len)) == finished_len


def test_a_step_commits_what_each_request_gained_and_none_where_nothing_was_gained() -> None:
    batch = FakeBatch([FakeRequest(output_ids=[7, 8, 9]), FakeRequest(output_ids=[4]), FakeRequest(output_ids=[])])
    assert commits_of_step(batch, [1, 1, 0]) == [CommittedTokens(1, (8, 9)), None, None]


def test_the_first_token_of_a_request_is_committed_at_output_index_zero() -> None:
    assert commits_of_step(FakeBatch([FakeRequest(output_ids=[7])]), [0]) == [CommittedTokens(0, (7,))]


def test_tokens_after_a_stop_are_never_committed() -> None:
    request = FakeRequest(output_ids=[7, 8, 2, 30, 31], finished_len=3)
    assert commits_of_step(FakeBatch([request]), [1]) == [CommittedTokens(1, (8, 2))]


def test_a_request_that_had_already_finished_commits_none_though_tokens_were_added_after_it() -> None:
    request = FakeRequest(output_ids=[7, 8, 2, 30], finished_len=3)
    assert commits_of_step(FakeBatch([request]), [3]) == [None]


def test_a_request_that_finished_without_a_new_visible_token_commits_none() -> None:
    assert commits_of_step(FakeBatch([FakeRequest(output_ids=[7, 2], finished_len=1)]), [1]) == [None]


def test_an_aborted_request_commits_none_whatever_it_gained() -> None:
    batch = FakeBatch([FakeRequest(output_ids=[7, 8], aborted=True), FakeRequest(output_ids=[9])])
    assert commits_of_step(batch, [0, 0]) == [None, CommittedTokens(0, (9,))]


def test_a_visible_length_that_shrinks_is_refused_and_names_the_request() -> None:
    batch = FakeBatch([FakeRequest(rid="chat-7", output_ids=[1])])
    with pytest.raises(RuntimeError, match=r"^committed output length moved backwards.*chat-7"):
        commits_of_step(batch, [2])


def test_a_finished_length_below_the_start_moves_backwards_too() -> None:
    batch = FakeBatch([FakeRequest(output_ids=[1, 2, 3], finished_len=1)])
    with pytest.raises(RuntimeError, match=r"^committed output length moved backwards"):
        commits_of_step(batch, [2])


def test_a_finished_length_beyond_the_output_is_refused() -> None:
    batch = FakeBatch([FakeRequest(rid="x", output_ids=[1], finished_len=4)])
    with pytest.raises(RuntimeError, match="'x' is finished at length 4 but has 1 output tokens"):
        commits_of_step(batch, [0])


@pytest.mark.parametrize("starts", [[], [0], [0, 0, 0]])
def test_starts_that_do_not_match_the_requests_are_refused(starts: list[int]) -> None:
    batch = FakeBatch([FakeRequest(output_ids=[1]), FakeRequest(output_ids=[2])])
    with pytest.raises(ValueError, match=f"found {len(starts)} starts for 2 requests"):
        commits_of_step(batch, starts)


@dataclass
class ServingRequest:
    """A request as a serving engine has it: what it said and how long it is, and no word of being aborted."""

    output_ids: list[int]
    finished_len: int | None = None
    rows: RecordingSink = field(default_factory=RecordingSink)


def test_a_request_without_a_word_of_being_aborted_is_not_aborted() -> None:
    batch = FakeBatch([ServingRequest([7, 8, 9]), ServingRequest([7, 8, 9], finished_len=2)])  # type: ignore[list-item]
    assert commits_of_step(batch, [1, 1]) == [CommittedTokens(1, (8, 9)), CommittedTokens(1, (8,))]
    states = HostHiddenStates(
        {"aux_hidden_states": torch.arange(4.0)[:, None, None]}, RowLayout((2, 2), (1, 1), (0, 0))
    )
    states.consume(batch, commits_of_step(batch, [1, 1]))
    assert [request.rows.appends for request in batch.reqs] == [
        [(1, {"aux_hidden_states": [[[0.0]], [[1.0]]]})],
        [(1, {"aux_hidden_states": [[[2.0]]]})],
    ]


def test_faults_of_such_a_request_are_told_without_its_name() -> None:
    with pytest.raises(RuntimeError, match="committed output length moved backwards: request None had 3, now 1"):
        commits_of_step(FakeBatch([ServingRequest([7])]), [3])  # type: ignore[list-item]
