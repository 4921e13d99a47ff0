"""A process that may open few files, or has no room, or no words to say."""

import errno
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddentap import CapturedDataset
from hiddentap.capture.cli.main import main
from hiddentap.capture.formats import ExportSettings, export_dataset
from hiddentap.capture.formats.containers import save_container
from hiddentap.capture.store import DiskFullError, Manifest, OutputFolder
from hiddentap.capture.stored_head import write_head
from support import tiny
from support.fork_server import Ended, ForkServer
from support.model_folder import write_rows
from support.shards import write_folder
from support.small_disk import small_disk


def test_three_hundred_shards_are_read_by_a_process_that_may_open_sixty_four_files(
    server: ForkServer, tmp_path: Path
) -> None:
    ended = server.call("many_shards_with_few_files", folder=str(tmp_path / "out"), shards=300, files=64)
    assert ended == Ended(0, "")


def test_a_dataset_over_many_shards_keeps_no_headers(tmp_path: Path) -> None:
    import tracemalloc

    out = write_folder(tmp_path / "out", 60)
    CapturedDataset(out)
    tracemalloc.start()
    data = CapturedDataset(out)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept / 60 < 6_000, kept / 60
    assert data.metadata == {"n": 0}


def test_a_container_that_does_not_fit_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(DiskFullError, match=r"no room for data\.ckpt"):
            save_container(disk / "data.ckpt", {"x": torch.zeros(1 << 20)})
        with pytest.raises(DiskFullError, match=r"no room for data\.ckpt\.gz"):
            save_container(disk / "data.ckpt.gz", {"x": torch.randn(1 << 20)})
        assert list(disk.iterdir()) == []


def test_a_head_that_does_not_fit_says_so(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "1m") as disk,
        pytest.raises(DiskFullError, match=r"no room for head\.safetensors"),
    ):
        write_head(disk / "head", tiny.build_llama(vocab_size=40_000), "model.norm")


def test_a_run_in_which_every_row_is_rejected_says_one_line_however_quiet(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"nothing": 1}])
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0", "--allow-rejects", "--quiet")
    ended = server.run(*command, "--out", tmp_path / "out")
    assert ended.code == 1
    assert [line.split(":")[:2] for line in ended.text.splitlines()] == [["hiddentap", " nothing was captured"]]


def test_an_error_of_the_system_with_a_number_for_a_name_is_told_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), 15)

    monkeypatch.setattr(import_module("hiddentap.capture.cli.main").hiddentap, "main", refused)
    with pytest.raises(SystemExit, match="1"):
        main()
    text = capsys.readouterr().err
    assert "Input/output error" in text
    assert "15" not in text


@pytest.mark.parametrize(
    ("call", "number", "advice"),
    [("stat", errno.EIO, "dmesg"), ("stat", errno.ESTALE, "mounted"), ("listdir", errno.EMFILE, "ulimit -n")],
)
def test_a_look_that_the_system_refuses_is_told_with_the_files_name_and_what_to_do(
    call: str,
    number: int,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = write_folder(tmp_path / "out", 2)
    place, real = str(out / "shards"), getattr(os, call)

    def refuse(path: object, *args: Any, **more: Any) -> object:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(place):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, call, refuse)
    monkeypatch.setattr("sys.argv", ["hiddentap", "verify", str(out), "--model", "none"])
    with pytest.raises(SystemExit, match="1"):
        main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"hiddentap: {place}")
    assert os.strerror(number) in lines[0]
    assert advice in lines[0]


def test_an_unfinished_generation_is_not_said_to_be_finished_by_running_it_again(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    out.shards.mkdir()
    Manifest.from_shards({"mode": "generation"}, {}, [], complete=False).write(out.manifest_path)
    reads = (
        lambda: CapturedDataset(tmp_path),
        lambda: export_dataset(ExportSettings(tmp_path, "deepspec", tmp_path / "d")),
    )
    for read in reads:
        with pytest.raises(
            Exception, match="A generation cannot be resumed: run it again into an empty folder"
        ) as caught:
            read()
        assert "Finish it" not in str(caught.value)
