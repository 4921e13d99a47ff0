"""An export that stops and goes on, the folder it fills, and what it tells."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hiddentap.capture.formats import ExportSettings, export_dataset
from hiddentap.capture.formats import specforge as specforge_module
from hiddentap.capture.progress import Done, Silent, Work
from hiddentap.capture.store import FolderLock, FolderLockedError
from hiddentap.models.errors import UsageError
from support.export_layouts import LAYOUTS
from support.layout_readers import containers
from support.trainer_dump import capture


class Recorder(Silent):
    """What was told."""

    def __init__(self) -> None:
        self.stretches: list[tuple[str, int]] = []
        self.notes: list[str] = []
        self.done: dict[str, list[tuple[int, int]]] = {}
        self.written = 0

    def started(self, work: Work) -> None:
        self.stretches.append((work.what, work.total))
        self.done[work.what] = []

    def advanced(self, done: Done) -> None:
        self.done[self.stretches[-1][0]].append((done.count, done.tokens))
        self.written += done.written

    def note(self, text: str) -> None:
        self.notes.append(text)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}


@pytest.mark.parametrize(("to", "options"), LAYOUTS, ids=[to for to, _ in LAYOUTS])
def test_an_export_that_failed_half_way_goes_on_to_the_same_files(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, options: dict
) -> None:
    export_dataset(ExportSettings(dump, to, tmp_path / "whole", **options))
    from hiddentap.capture.formats.job import ExportJob

    read = ExportJob.input_ids

    def full_disk(self: ExportJob, number: int) -> torch.Tensor:
        if number == 3:
            raise OSError("no")
        return read(self, number)

    monkeypatch.setattr(ExportJob, "input_ids", full_disk)
    with pytest.raises(OSError, match="no"):
        export_dataset(ExportSettings(dump, to, tmp_path / "d", **options))
    monkeypatch.undo()
    assert json.loads((tmp_path / "d/hiddentap-export.json").read_text())["complete"] is False
    assert not [name for name in contents(tmp_path / "d") if name.endswith((".partial", ".open"))]
    summary = export_dataset(ExportSettings(dump, to, tmp_path / "d", **options))
    assert 0 < summary.files_done_before < summary.files
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")


def test_files_that_are_there_are_not_written_again(dump: Path, tmp_path: Path) -> None:
    settings = ExportSettings(dump, "modelopt", tmp_path / "d")
    export_dataset(settings)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "d").glob("*.pt")}
    summary = export_dataset(settings)
    assert (summary.files, summary.files_done_before, summary.samples, summary.tokens) == (5, 5, 5, 53)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "d").glob("*.pt")} == before


KILLED = """
import os, signal, sys
import torch
from hiddentap.capture.formats import ExportSettings, export_dataset

save, calls = torch.save, []

def save_half(values, file):
    calls.append(None)
    if len(calls) < 3:
        return save(values, file)
    file.write(b"PK half a file")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = save_half
export_dataset(ExportSettings(sys.argv[1], "specforge", sys.argv[2], algorithm="eagle3"))
"""


def test_a_kill_in_the_middle_of_a_file_leaves_no_broken_one_under_a_real_name(dump: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(dump), str(tmp_path / "d")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(containers(tmp_path / "d", ".ckpt")) == 2
    export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="eagle3"))
    export_dataset(ExportSettings(dump, "specforge", tmp_path / "whole", algorithm="eagle3"))
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")


def test_another_request_on_the_same_folder_is_refused(dump: Path, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="dflash"))
    with pytest.raises(UsageError, match='algorithm: "dflash" -> "domino"'):
        export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="domino"))
    with pytest.raises(UsageError, match="min_supervised: 1 -> 2"):
        export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="dflash", min_supervised=2))


def test_another_capture_on_the_same_folder_is_refused(dump: Path, dump32: Path, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "d"))
    with pytest.raises(UsageError, match='store_dtype: "bfloat16" -> "float32"'):
        export_dataset(ExportSettings(dump32, "deepspec", tmp_path / "d"))


def test_a_folder_with_other_things_in_it_is_refused(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no export of ours"):
        export_dataset(ExportSettings(dump, "deepspec", tmp_path / "d"))
    with pytest.raises(UsageError, match="is a file"):
        export_dataset(ExportSettings(dump, "deepspec", tmp_path / "d/notes.txt"))
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["notes.txt"]


def test_two_exports_into_one_folder_at_once_are_refused(dump: Path, tmp_path: Path) -> None:
    settings = ExportSettings(dump, "deepspec", tmp_path / "d")
    export_dataset(settings)
    with FolderLock(tmp_path / "d/.hiddentap-lock"), pytest.raises(FolderLockedError):
        export_dataset(settings)


def test_progress_counts_every_sample_of_each_stretch(dump: Path, tmp_path: Path) -> None:
    told = Recorder()
    export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="dflash"), told)
    assert told.stretches == [("reading masks", 5), ("exporting", 3), ("checksums", 5)]
    assert told.done["exporting"] == [(1, 7), (1, 12), (1, 23)]
    assert told.done["checksums"] == [(1, 0)] * 5
    files = list((tmp_path / "d").rglob("*.ckpt"))
    assert len(files) == 3
    assert told.written == sum(path.stat().st_size for path in files)


NOTES = [
    ("specforge", {"algorithm": "eagle3"}, "post-norm is made from pre-norm by the model's own norm module"),
    ("eagle1", {}, "rows are stored as bfloat16 and EAGLE-1 holds float16: they are rounded"),
    ("eagle1", {}, "EAGLE-1 has no auxiliary layers: those of the capture are left out"),
]


@pytest.mark.parametrize(("to", "options", "note"), NOTES)
def test_what_is_converted_or_left_out_is_told(dump: Path, tmp_path: Path, to: str, options: dict, note: str) -> None:
    told = Recorder()
    export_dataset(ExportSettings(dump, to, tmp_path / "d", **options), told)
    assert note in told.notes


def test_a_mapping_that_cannot_be_made_is_told_where_the_trainer_can_do_without(dump: Path, tmp_path: Path) -> None:
    headless = tmp_path / "out"
    shutil.copytree(dump, headless)
    shutil.rmtree(headless / "head")
    told = Recorder()
    export_dataset(ExportSettings(headless, "specforge", tmp_path / "d", algorithm="dflash"), told)
    assert told.notes == [
        "no vocabulary mapping is written: SpecForge's vocabulary mapping needs --target-vocab-size or a head"
    ]
    assert not (tmp_path / "d/vocab_mapping").exists()


def test_one_sample_at_a_time_is_read(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two reads of hidden states the file of the first is complete."""
    from hiddentap.capture.formats.captured import CapturedFolder

    read, finished = CapturedFolder.aux_hidden_states, []

    def watched(self: CapturedFolder, i: int, rows: int) -> torch.Tensor:
        finished.append(len(list((tmp_path / "d").rglob("*.ckpt"))))
        return read(self, i, rows)

    monkeypatch.setattr(CapturedFolder, "aux_hidden_states", watched)
    export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="eagle3"))
    assert finished == [0, 1, 2, 3, 4]


def test_reading_masks_reads_no_hidden_states(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddentap.capture.store import Shard

    read, columns = Shard.checked_rows, []

    def watched(self: Shard, position: int, name: str) -> torch.Tensor:
        columns.append(name)
        return read(self, position, name)

    monkeypatch.setattr(Shard, "checked_rows", watched)
    monkeypatch.setattr(Shard, "rows", lambda *_: pytest.fail("an unchecked read"))
    with pytest.raises(RuntimeError):
        export_dataset(ExportSettings(dump, "deepspec", tmp_path / "d", min_supervised=99))
    assert set(columns) == {"loss_mask"}


def test_groups_begin_at_multiples(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specforge_module, "GROUP", 2)
    export_dataset(ExportSettings(dump, "specforge", tmp_path / "d", algorithm="eagle3"))
    assert sorted(str(p.relative_to(tmp_path / "d")) for p in (tmp_path / "d").rglob("*.ckpt")) == [
        "rows_00000000-00000002/data_00000000.ckpt",
        "rows_00000000-00000002/data_00000001.ckpt",
        "rows_00000002-00000004/data_00000002.ckpt",
        "rows_00000002-00000004/data_00000003.ckpt",
        "rows_00000004-00000006/data_00000004.ckpt",
    ]


def test_a_model_with_another_norm_gets_post_norm_by_its_own_module(data: Path, tmp_path: Path) -> None:
    """Gemma's norm multiplies by 1 + w: the weight alone would not do."""
    from transformers import AutoModelForCausalLM

    from support import tiny
    from support.model_folder import VOCAB, model_folder
    from support.trainer_dump import IDS, token_ids

    folder = model_folder(tmp_path / "m", tiny.build("gemma2", vocab_size=VOCAB, pad_token_id=None))
    dump = capture(folder, data, tmp_path / "out", (1, 2), dtype="bfloat16")
    export_dataset(ExportSettings(dump, "modelopt", tmp_path / "d"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        output = model.model(torch.tensor([token_ids(IDS[0])]), use_cache=False)
    assert torch.equal(containers(tmp_path / "d", ".pt")[0]["hidden_states"], output.last_hidden_state[0])
