"""A generation that was stopped, as the same command takes it up again."""

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hiddentap import CapturedDataset
from hiddentap.capture.store import GrowingShardWriter, Manifest, Shard
from support.model_folder import llama_folder, write_rows

ROWS = [{"id": f"r{i}", "text": "Once upon a time"[: 5 + i]} for i in range(6)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]], llama: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`hiddentap generate` over six rows: (exit code, standard output, standard error)."""
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    return partial(
        run, "generate", "--model", llama, "--data", data, "--layer-ids", "0,2", "--max-new-tokens", 6,
        "--shard-rows", 35, "--ignore-eos", "--out",
    )  # fmt: skip


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ends the next run by SIGTERM once its first shard is sealed."""

    def prepare() -> None:
        seal = GrowingShardWriter.seal

        def seal_and_signal(writer: GrowingShardWriter) -> Shard:
            monkeypatch.setattr(GrowingShardWriter, "seal", seal)
            sealed = seal(writer)
            signal.raise_signal(signal.SIGTERM)
            return sealed

        monkeypatch.setattr(GrowingShardWriter, "seal", seal_and_signal)

    return prepare


def tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".hiddentap-lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def ids_of(out: Path) -> list[Any]:
    dataset = CapturedDataset(out)
    return [dataset[i]["output_ids"].tolist() for i in range(len(dataset))]


def test_a_stopped_generation_says_that_it_resumes_and_does(run, stopped, tmp_path: Path) -> None:
    run(tmp_path / "whole", "--seed", 3)
    stopped()
    code, _, err = run(tmp_path / "out", "--seed", 3)
    assert code == 143
    assert "Finish it by running it again." in err
    manifest = Manifest.read(tmp_path / "out/manifest.json")
    assert not manifest.complete
    assert manifest.way_on == "Finish it by running it again."
    assert len(list((tmp_path / "out/shards").iterdir())) == 1
    code, out, _ = run(tmp_path / "out", "--seed", 3)
    assert code == 0
    assert "6 captured" in out
    assert "1 of 3 shards were done before" in out
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_without_a_seed_a_resumed_generation_still_draws_the_numbers_of_the_first(run, stopped, tmp_path: Path) -> None:
    stopped()
    run(tmp_path / "out")
    seed = Manifest.read(tmp_path / "out/manifest.json").plan["seed"]
    run(tmp_path / "out")
    run(tmp_path / "seeded", "--seed", seed)
    assert ids_of(tmp_path / "out") == ids_of(tmp_path / "seeded")
    run(tmp_path / "other")
    assert ids_of(tmp_path / "out") != ids_of(tmp_path / "other")


def test_a_generation_that_is_over_is_left_as_it_is(run, tmp_path: Path) -> None:
    run(tmp_path / "out", "--seed", 3)
    before = tree(tmp_path / "out")
    code, out, _ = run(tmp_path / "out", "--seed", 3)
    assert code == 0
    assert "6 captured" in out
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--temperature", 0.5), "sampling.temperature: 1.0 -> 0.5"),
        (("--seed", 4), "sampling.seed: 3 -> 4"),
        (("--max-batch", 3), "steps.max_batch: 16 -> 3"),
        (("--layer-ids", "1"), "taps.layer_ids: [0, 2] -> [1]"),
        (("--shard-rows", 70), "shard_rows: 35 -> 70"),
        (("--limit", 4), "limit: null -> 4"),
        (("--drop-truncated",), "drop_truncated: false -> true"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_other_settings_than_those_it_began_with_are_refused_by_name(
    run, stopped, tmp_path: Path, changed: tuple[Any, ...], named: str
) -> None:
    stopped()
    run(tmp_path / "out", "--seed", 3)
    before = tree(tmp_path / "out")
    code, _, err = run(tmp_path / "out", "--seed", 3, *changed)
    assert code == 2
    assert "holds another run" in err
    assert named in err
    assert tree(tmp_path / "out") == before


def test_changed_data_are_refused(run, stopped, tmp_path: Path) -> None:
    stopped()
    run(tmp_path / "out", "--seed", 3)
    write_rows(tmp_path / "rows.jsonl", [*ROWS, {"text": "more"}])
    code, _, err = run(tmp_path / "out", "--seed", 3)
    assert code == 2
    assert "data: [{" in err


def test_a_damaged_shard_is_made_again(run, tmp_path: Path) -> None:
    run(tmp_path / "out", "--seed", 3)
    before = tree(tmp_path / "out")
    shard = tmp_path / "out/shards/shard-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    code, _, err = run(tmp_path / "out", "--seed", 3)
    assert code == 0
    assert "shard-000001.safetensors is not whole and is made again" in err
    assert tree(tmp_path / "out") == before


def test_a_folder_of_something_else_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    code, _, err = run(tmp_path / "out")
    assert code == 2
    assert "is not empty; a generation needs an empty or a new folder, or one that the same command began" in err


def test_answers_that_ended_by_length_can_be_left_out(run, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path / "out", "--seed", 3, "--drop-truncated")
    assert code == 1
    assert "6 rejected" not in out.splitlines()[-1]
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert {(one["reason"], one["detail"]["code"]) for one in rejects} == {
        ("the answer ended by length, after 6 tokens", "length")
    }
    assert Manifest.read(tmp_path / "out/manifest.json").counts["finish_reasons"] == {"length": 6}
