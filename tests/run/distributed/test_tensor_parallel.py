"""One model over two gloo processes, through the command: the rows of one process, one writer, and nobody left behind."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.models.errors import UsageError
from hiddentap.models.loading import ModelLoadError, load_model
from support import tiny
from support.fork_server import Ended, ForkServer, Run
from support.model_folder import VOCAB, chat, model_folder, write_rows

pytestmark = pytest.mark.slow

MANY = [chat("q" * (i % 7), "a" * (5 + i % 23), id=f"s{i}") for i in range(80)]
# Float32: sums over the split widths are added up in halves, so they are rounded in another order.
BOUND = 1e-5
LONG = 90  # seconds in which every process of a run must have ended, whatever became of it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("runs")) as server:
        yield server


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "many.jsonl", MANY)


def command(model: Path, data: Path, out: Path, *more: object) -> tuple[object, ...]:
    options = ("--layer-ids", "0,2", "--shard-rows", 500, "--batch-tokens", 300)
    return ("capture", "--model", model, "--data", data, "--out", out, *options, *more)


def ended(runs: list[Run]) -> list[Ended]:
    return [run.ended_within(LONG) for run in runs]


def alone(model: Path, data: Path, out: Path, **fields: object) -> Path:
    same = {"layer_ids": (0, 2), "shard_rows": 500, "batch_tokens": 300}
    capture_dataset(CaptureSettings(ModelSource(str(model)), (str(data),), out, **(same | fields)))
    return out


def farthest(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative distance of a row from the expected one."""
    return float(((rows - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def shards(out: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted(out.glob("shards/*.safetensors"))]


def test_rows_are_those_of_one_process_within_the_bound_and_only_the_first_process_writes(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    then = {"layers_noted": {"folder": str(notes)}, "memory_for": {"positions": 200}}
    ends = ended(
        server.start_ranks(2, *command(llama, many, tmp_path / "two", "--final", "none", "--tp", 2), then=then)
    )
    assert [end.code for end in ends] == [0, 0], ends
    assert "80 captured, 0 rejected" in ends[0].text
    assert "a batch of 300 positions did not fit cpu; trying 150" in ends[0].text or "did not fit" in ends[0].text
    assert "captured" not in ends[1].text

    expected = shards(alone(llama, many, tmp_path / "one", final="none"))
    found = shards(tmp_path / "two")
    assert len(found) == len(expected) > 4
    for two, one in zip(found, expected, strict=True):
        assert torch.equal(two["input_ids"], one["input_ids"])
        assert farthest(two["aux_hidden_states"], one["aux_hidden_states"]) < BOUND
    # The forwards end after layer 2, as many times on the one as on the other.
    ran = {path.name: len(path.read_text()) for path in notes.iterdir()}
    assert set(ran) == {f"rank-{rank}-layer-{layer}" for rank in range(2) for layer in range(3)}
    assert len(set(ran.values())) == 1
    with safe_open(tmp_path / "two/shards/shard-000000.safetensors", "pt") as file:
        (metadata,) = (json.loads(value) for value in file.metadata().values())
    assert '"tensor_parallel": 2' in json.dumps(metadata)


def test_head_norm_states_and_top_logits_come_whole_from_a_split_model(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path
) -> None:
    asked = ("--final", "both", "--head", "--top-logits", 3, "--tp", 2)
    ends = ended(server.start_ranks(2, *command(llama, many, tmp_path / "two", *asked)))
    assert [end.code for end in ends] == [0, 0], ends
    alone(llama, many, tmp_path / "one", final="both", head=True, top_logits=3)
    for two, one in zip(shards(tmp_path / "two"), shards(tmp_path / "one"), strict=True):
        for name in ("pre_norm", "post_norm", "topk_logits"):
            assert farthest(two[name], one[name]) < BOUND
        assert (two["topk_ids"] == one["topk_ids"]).float().mean() > 0.999
    heads = [load_file(tmp_path / name / "head/head.safetensors") for name in ("one", "two")]
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


def test_two_groups_of_two_share_the_shards_and_give_the_bytes_of_one_group(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path
) -> None:
    ends = ended(server.start_ranks(4, *command(llama, many, tmp_path / "four", "--tp", 2)))
    assert [end.code for end in ends] == [0] * 4, ends
    assert [end.code for end in ended(server.start_ranks(2, *command(llama, many, tmp_path / "two", "--tp", 2)))] == [
        0,
        0,
    ]
    four, two = (
        {path.name: path.read_bytes() for path in (tmp_path / n / "shards").iterdir()} for n in ("four", "two")
    )
    assert four == two
    assert len(CapturedDataset(tmp_path / "four")) == 80


def test_a_process_that_runs_out_of_memory_where_the_other_does_not_ends_both_in_words(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path
) -> None:
    then = {"memory_for": {"positions": 200, "only": 1, "patience": 2.0}}
    first, second = ended(server.start_ranks(2, *command(llama, many, tmp_path / "out", "--tp", 2), then=then))
    assert "ran out of memory where the others did not" in second.text
    assert second.code == 1
    assert first.code == 1
    assert "another process of this run failed: rank 1: one process of a tensor-parallel group ran out" in first.text


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_in_one_process_ends_both_and_the_run_goes_on_in_one(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path, bad: int
) -> None:
    then = {"bad_kernel": {"only": bad, "number": 5}}
    ends = ended(server.start_ranks(2, *command(llama, many, tmp_path / "out", "--tp", 2), then=then))
    assert "ValueError: the kernel is bad" in ends[bad].text
    assert f"another process of this run failed: rank {bad}: the kernel is bad" in ends[1 - bad].text
    assert [end.code for end in ends] == [1, 1]
    assert not list((tmp_path / "out/shards").glob("*.open"))
    assert server.run(*command(llama, many, tmp_path / "out")).code == 0
    assert len(CapturedDataset(tmp_path / "out")) == 80


def test_a_killed_process_ends_the_other_in_words(server: ForkServer, llama: Path, many: Path, tmp_path: Path) -> None:
    then = {"bad_kernel": {"only": 1, "number": 5, "signal_instead": int(signal.SIGKILL)}}
    first, second = ended(server.start_ranks(2, *command(llama, many, tmp_path / "out", "--tp", 2), then=then))
    assert second.code == -signal.SIGKILL
    assert first.code == 1
    assert "a process of this one's tensor-parallel group is gone" in first.text


def test_a_signal_to_one_process_stops_all_after_the_same_forward(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path
) -> None:
    then = {"bad_kernel": {"only": 1, "number": 5, "signal_instead": int(signal.SIGTERM)}}
    first, second = ended(server.start_ranks(2, *command(llama, many, tmp_path / "out", "--tp", 2), then=then))
    assert first.code == 143, first
    assert "stopped by SIGTERM" in first.text
    assert second.code == 143, second
    assert [end.code for end in ended(server.start_ranks(2, *command(llama, many, tmp_path / "out", "--tp", 2)))] == [
        0,
        0,
    ]
    assert len(CapturedDataset(tmp_path / "out")) == 80


def test_ranks_that_make_no_whole_group_are_refused(
    server: ForkServer, llama: Path, many: Path, tmp_path: Path
) -> None:
    run = server.run(*command(llama, many, tmp_path / "out", "--tp", 2))
    assert run.code == 2
    assert (
        "tp=2 spreads the model over 2 processes, and this run has 1; start 2, or a multiple, with torchrun" in run.text
    )
    ends = ended(server.start_ranks(2, *command(llama, many, tmp_path / "out", "--tp", 4)))
    assert [end.code for end in ends] == [2, 2]
    assert "and this run has 2" in ends[1].text
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_plan_or_with_heads_that_do_not_split_is_refused(llama: Path, tmp_path: Path) -> None:
    unplanned = model_folder(tmp_path / "gpt2", tiny.build("gpt2", vocab_size=VOCAB, pad_token_id=None))
    with pytest.raises(ModelLoadError, match="gpt2 has no tensor-parallel plan: GPT2Config says nothing of how"):
        load_model(ModelSource(str(unplanned)), 2)
    with pytest.raises(ModelLoadError, match="has num_attention_heads=4, which tp=3 processes cannot share evenly"):
        load_model(ModelSource(str(llama)), 3)
    with pytest.raises(ModelLoadError, match="has num_key_value_heads=2, which tp=4 processes"):
        load_model(ModelSource(str(llama)), 4)
    with pytest.raises(ModelLoadError, match="leave device and device_map out"):
        load_model(ModelSource(str(llama), device="cpu"), 2)


def test_exact_runs_and_a_count_below_one_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exact and tp exclude each other"):
        CaptureSettings(ModelSource(str(llama)), ("d",), tmp_path, layer_ids=(0,), exact=True, tp=2)
    with pytest.raises(UsageError, match="tp must be at least 1; got 0"):
        CaptureSettings(ModelSource(str(llama)), ("d",), tmp_path, layer_ids=(0,), tp=0)
