"""Bad shards are taken out, and the capture that made the folder makes exactly these again."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hiddentap.capture.store import FolderLockedError, OutputFolder
from hiddentap.capture.verify import verify
from hiddentap.models.errors import RunError, UsageError
from support.captured import FIRST, SECOND, captured
from support.damage import Columns, flip_bit, rewrite
from support.model_folder import llama_folder


@pytest.fixture(scope="module")
def good(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(llama, tmp_path_factory.mktemp("good") / "out", exact=True)


def recapture(llama: Path, good: Path, out: Path) -> None:
    captured(llama, out, data=good.with_suffix(".jsonl"), exact=True)


def flip(out: Path) -> None:
    flip_bit(out / "shards" / SECOND, "pre_norm")


def cut(out: Path) -> None:
    os.truncate(out / "shards" / SECOND, 3000)


def change_layer(out: Path) -> None:
    def change(columns: Columns) -> None:
        columns["aux_hidden_states"][:, 0] = columns["aux_hidden_states"][:, 1]

    rewrite(out, change, index=1)


def change_tokens(out: Path) -> None:
    def change(columns: Columns) -> None:
        columns["input_ids"][4] = 40

    rewrite(out, change, index=1)


def poison(out: Path) -> None:
    def change(columns: Columns) -> None:
        columns["pre_norm"][2] = torch.inf

    rewrite(out, change, sample="s4", index=1)


@pytest.mark.parametrize("damage", [flip, cut, change_layer, change_tokens, poison])
def test_a_bad_shard_goes_and_the_same_capture_makes_it_again(damage: Callable[[Path], None], good, llama, out) -> None:
    damage(out)
    untouched = (out / "shards" / FIRST).stat().st_mtime_ns
    report = verify(out, samples=1, repair=True)
    assert report.repaired == (SECOND,)
    assert not report.ok
    assert [path.name for path in (out / "shards").iterdir()] == [FIRST]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["complete"], [entry["file"] for entry in manifest["shards"]]) == (False, [f"shards/{FIRST}"])
    (line,) = (out / "repairs.jsonl").read_text().splitlines()
    assert json.loads(line)["removed"] == SECOND
    assert json.loads(line)["why"]

    recapture(llama, good, out)
    assert (out / "shards" / SECOND).read_bytes() == (good / "shards" / SECOND).read_bytes()
    assert (out / "shards" / FIRST).stat().st_mtime_ns == untouched
    assert verify(out).ok


def test_nothing_goes_from_a_good_folder(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    report = verify(out, repair=True)
    assert (report.ok, report.repaired) == (True, ())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not (out / "repairs.jsonl").exists()


def test_without_repair_nothing_goes(out: Path) -> None:
    flip(out)
    assert verify(out).repaired == ()
    assert (out / "shards" / SECOND).exists()


def test_what_is_found_beside_another_model_removes_nothing(out: Path, tmp_path: Path) -> None:
    stranger = llama_folder(tmp_path / "stranger", seed=1)
    report = verify(out, model=stranger, repair=True)
    assert (report.ok, report.repaired) == (False, ())
    assert len(list((out / "shards").iterdir())) == 2


def test_each_repair_is_written_down_after_the_ones_before(good, llama, out: Path) -> None:
    for damage in (flip, cut):
        damage(out)
        verify(out, repair=True)
        recapture(llama, good, out)
    assert [json.loads(line)["removed"] for line in (out / "repairs.jsonl").read_text().splitlines()] == [
        SECOND,
        SECOND,
    ]


def test_rows_that_a_run_was_told_to_keep_are_found_and_stay(llama: Path, tmp_path: Path) -> None:
    out = captured(llama, tmp_path / "kept", exact=True, on_bad_values="keep")
    poison(out)
    report = verify(out, model="none", repair=True)
    assert (len(report.findings), report.repaired) == (1, ())


def test_a_folder_without_a_plan_is_not_repaired(out: Path) -> None:
    shutil.rmtree(out / "plan")
    with pytest.raises(UsageError, match=r"cannot be repaired: shards are made again from the plan of a capture"):
        verify(out, repair=True)


def test_a_folder_that_is_being_written_is_not_repaired(out: Path) -> None:
    flip(out)
    with OutputFolder(out).lock(), pytest.raises(FolderLockedError, match="is being written by process"):
        verify(out, repair=True)
    assert (out / "shards" / SECOND).exists()


@pytest.mark.parametrize("again", ["capture", "repair"])
def test_a_shard_that_cannot_be_opened_for_now_ends_the_work_and_stays(
    again: str, llama: Path, good: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    plain_open = os.open

    def failing(path: Path | str, *args: object, **more: object) -> int:
        if Path(path).name == SECOND:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain_open(path, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        with pytest.raises(RunError, match=f"{SECOND}: cannot be opened .Input/output error"):
            recapture(llama, good, out) if again == "capture" else verify(out, repair=True)
    assert {path.name: path.read_bytes() for path in (out / "shards").iterdir()} == before
    recapture(llama, good, out)
    assert {path.name: path.read_bytes() for path in (out / "shards").iterdir()} == before
