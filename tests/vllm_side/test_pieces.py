"""Rows between vLLM's cache and the run: which a step makes, and the memory they come to."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hiddentap.capture.run.engines.vllm.arena import ArenaShape, RowArena
from hiddentap.capture.run.engines.vllm.pieces import StepPiece, StepPieces, write_pieces


@pytest.fixture
def arena():
    made = RowArena.make(ArenaShape(20, 2, 3, "float32"))
    made.clear(20)
    yield made
    made.close()


def request(req_id: str, ids: list[int] | None, row: int | None) -> SimpleNamespace:
    extra = None if row is None else {"kv_transfer_params": {"hiddentap_row": row}}
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=ids,
        block_ids=([1, 2], [8, 9]),
        num_computed_tokens=0,
        sampling_params=SimpleNamespace(extra_args=extra),
    )


def step(scheduled: dict[str, int], *, new: tuple[SimpleNamespace, ...] = (), **known: object) -> SimpleNamespace:
    nothing = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": [], "resumed_req_ids": set()}
    return SimpleNamespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=SimpleNamespace(**nothing | known), num_scheduled_tokens=scheduled
    )


def test_a_step_makes_the_rows_of_the_requests_that_name_a_place() -> None:
    new = (
        request("a", [5, 6, 7], 40),
        request("warm-up", [1, 1], None),
        request("b", [9], 43),
        request("embeds", None, 0),
    )
    pieces = StepPieces(1).of_step(step({"a": 3, "warm-up": 2, "b": 1, "embeds": 1}, new=new))
    assert pieces == (StepPiece(40, 0, (5, 6, 7), (8, 9)), StepPiece(43, 0, (9,), (8, 9)))


def test_a_prompt_is_followed_over_steps_and_what_is_generated_after_it_has_no_rows() -> None:
    steps = StepPieces(0)
    assert steps.of_step(step({"a": 2}, new=(request("a", [5, 6, 7, 8], 10),))) == (StepPiece(10, 0, (5, 6), (1, 2)),)
    more = step({"a": 1}, req_ids=["a"], new_block_ids=[None], num_computed_tokens=[2])
    assert steps.of_step(more) == (StepPiece(12, 2, (7,), (1, 2)),)
    last = step({"a": 3}, req_ids=["a"], new_block_ids=[([3], [4])], num_computed_tokens=[3])
    assert steps.of_step(last) == (StepPiece(13, 3, (8,), (1, 2, 3)),)
    beyond = step({"a": 1}, req_ids=["a"], new_block_ids=[None], num_computed_tokens=[4])
    assert steps.of_step(beyond) == ()
    steps.forget("a")
    assert steps.of_step(more) == ()


def test_a_request_that_was_set_back_has_its_new_blocks_alone() -> None:
    steps = StepPieces(0)
    steps.of_step(step({"a": 2}, new=(request("a", [5, 6, 7], 0),)))
    again = step({"a": 3}, req_ids=["a"], new_block_ids=[([6, 3], [])], num_computed_tokens=[0], resumed_req_ids={"a"})
    assert steps.of_step(again) == (StepPiece(0, 0, (5, 6, 7), (6, 3)),)


def test_rows_are_taken_from_the_blocks_of_their_request_in_order(arena: RowArena) -> None:
    block, k, slot, h = torch.meshgrid(*(torch.arange(n) for n in (6, 2, 4, 3)), indexing="ij")
    cache = (1000.0 * block + 100 * k + 10 * slot + h).float()
    write_pieces([StepPiece(3, 0, (11, 12, 13, 14, 15), (5, 2, 0)), StepPiece(0, 3, (21, 22), (4, 1))], cache, arena)
    assert arena.token_ids[:9].tolist() == [21, 22, -1, 11, 12, 13, 14, 15, -1]
    assert arena.states[3:8, 0, 0].tolist() == [5000, 5010, 5020, 5030, 2000]
    assert arena.states[7].tolist() == [[2000, 2001, 2002], [2100, 2101, 2102]]
    assert arena.states[0:2, 1, 2].tolist() == [4132, 1102]


def test_another_process_writes_into_the_same_memory(arena: RowArena) -> None:
    # Token ids are first, 4 bytes each; the states begin at the next multiple of 64: 128 for 20 rows.
    program = (
        "import mmap, struct, sys\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    memory = mmap.mmap(file.fileno(), 0)\n"
        "struct.pack_into('<i', memory, 4 * 2, 77)\n"
        "struct.pack_into('<3f', memory, 128 + 4 * (2 * 6 + 3), 1.5, -2.0, 8.0)\n"
    )
    subprocess.run([sys.executable, "-S", "-c", program, arena.path], check=True)
    assert arena.token_ids[:4].tolist() == [-1, -1, 77, -1]
    assert arena.states[2].tolist() == [[0, 0, 0], [1.5, -2.0, 8.0]]


def test_a_second_opening_of_the_path_sees_the_same_rows_in_half_precision() -> None:
    shape = ArenaShape(5, 1, 4, "bfloat16")
    one = RowArena.make(shape)
    two = RowArena.at(one.path, ArenaShape(**shape.as_json()))
    two.write(4, torch.tensor([9]), torch.tensor([[[1.0, 2.0, 3.0, -4.0]]]))
    assert (int(one.token_ids[4]), one.states[4].tolist()) == (9, [[1.0, 2.0, 3.0, -4.0]])
    assert one.states.dtype == torch.bfloat16
    one.clear(5)
    assert two.token_ids.tolist() == [-1] * 5
    one.close()
    two.close()
