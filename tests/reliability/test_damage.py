"""A damaged shard, through the commands: `verify` names it, and it alone is made again, to the same bytes."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddentap.capture.run import CaptureSettings, capture_dataset
from hiddentap.models.errors import RunError
from hiddentap.models.loading import ModelSource
from support.damage import flip_bit
from support.fork_server import ForkServer
from support.model_folder import chat, write_rows

ROWS = [chat("q" * (i % 7), "a" * (20 + i % 31), id=f"s{i}") for i in range(30)]
DAMAGED = "shard-000001.safetensors"


@pytest.fixture(scope="module")
def whole(server: ForkServer, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    write_rows(out.with_suffix(".jsonl"), ROWS)
    assert server.run(*capture(llama, out, out)).code == 0
    assert len(list((out / "shards").iterdir())) == 3
    return out


def capture(llama: Path, whole: Path, out: Path) -> tuple[object, ...]:
    data = whole.with_suffix(".jsonl")
    options = ("--layer-ids", "0,2", "--exact", "--shard-rows", 700, "--out", out)
    return ("capture", "--model", llama, "--data", data, *options)


def cut_rows(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_header(path: Path) -> None:
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    os.truncate(path, 8 + length // 2)


def cut_length(path: Path) -> None:
    os.truncate(path, 5)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_rows(path: Path) -> None:
    flip_bit(path, "aux_hidden_states", byte=12_345)


@pytest.mark.parametrize("damage", [cut_rows, cut_header, cut_length, empty, flip_rows])
def test_the_damaged_shard_is_named_and_it_alone_is_made_again(
    damage: Callable[[Path], None], server: ForkServer, llama: Path, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    damage(out / "shards" / DAMAGED)
    before = {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir() if path.name != DAMAGED}
    found = server.run("verify", out, "--model", "none")
    assert found.code == 1
    assert DAMAGED in found.text
    if damage is flip_rows:  # what only reading every byte finds is taken out by whoever read them
        assert server.run("verify", out, "--model", "none", "--repair").code == 1
    again = server.run(*capture(llama, whole, out))
    assert again.code == 0, again.text
    assert "2 shard(s)" in again.text
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for path in (out / "shards").iterdir():
        assert path.read_bytes() == (whole / "shards" / path.name).read_bytes()
    assert server.run("verify", out, "--model", llama).code == 0


def test_a_resume_that_makes_a_shard_again_calls_the_folder_incomplete_meanwhile(
    llama: Path, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    cut_rows(out / "shards" / DAMAGED)
    assert json.loads((out / "manifest.json").read_text())["complete"]

    def no_engine(*_: object) -> None:
        raise RunError("no engine")

    settings = CaptureSettings(
        ModelSource(str(llama)), (str(whole.with_suffix(".jsonl")),), out, layer_ids=(0, 2), exact=True, shard_rows=700
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hiddentap.capture.run.offline.opened", no_engine)
        with pytest.raises(RunError, match="no engine"):
            capture_dataset(settings)
    manifest = json.loads((out / "manifest.json").read_text())
    assert not manifest["complete"]
    assert [entry["file"][-13:] for entry in manifest["shards"]] == ["0.safetensors", "2.safetensors"]
    capture_dataset(settings)
    assert json.loads((out / "manifest.json").read_text()) == json.loads((whole / "manifest.json").read_text())
