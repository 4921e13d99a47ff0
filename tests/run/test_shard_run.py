"""What a run does when the device, the disk or somebody outside will not go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.progress import Done, Silent
from hiddentap.capture.run import RunStopped, Stopping
from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine
from hiddentap.capture.store import PlannedShardWriter
from hiddentap.models.errors import RunError
from support.model_folder import CHATS, chat, write_rows

MANY = [chat("q" * (i % 7), "a" * (5 + i % 11), id=f"s{i}") for i in range(60)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "many.jsonl", MANY)


def settings(model: Path, data: Path, out: Path, **fields: object) -> CaptureSettings:
    return CaptureSettings(model=ModelSource(str(model)), data=(str(data),), out=out, layer_ids=(0, 2), **fields)


class Notes(Silent):
    """A progress that remembers its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def out_of_memory_above(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Make the device hold at most `most` positions of a batch; returns the sizes that were run."""
    forward, ran = HuggingFaceEngine.forward, []

    def limited(self, batch):
        if batch.input_ids.numel() > most:
            raise torch.OutOfMemoryError("no room")
        ran.append(batch.input_ids.numel())
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceEngine, "forward", limited)
    return ran


def test_a_batch_that_does_not_fit_is_halved_until_it_does(llama, data, tmp_path, monkeypatch) -> None:
    ran = out_of_memory_above(monkeypatch, 400)
    notes = Notes()
    summary = capture_dataset(settings(llama, data, tmp_path / "out", batch_tokens=4096), notes)
    assert summary.captured == 60
    assert max(ran) <= 400
    assert any("did not fit cpu; trying" in note for note in notes.notes)
    assert len(notes.notes) < 8


def test_a_single_sample_that_does_not_fit_ends_the_run_by_its_id(llama, data, tmp_path, monkeypatch) -> None:
    out_of_memory_above(monkeypatch, 10)
    with pytest.raises(RunError, match=r"sample 's\d+' of \d+ tokens does not fit the memory of cpu"):
        capture_dataset(settings(llama, data, tmp_path / "out", batch_tokens=512))


def test_a_writer_that_fails_ends_the_run_with_its_error_at_once(llama, data, tmp_path, monkeypatch) -> None:
    write, calls = PlannedShardWriter.write, []

    def failing(self, row_start, rows):
        calls.append(1)
        if len(calls) == 10:
            raise OSError(5, "the disk is gone")
        return write(self, row_start, rows)

    monkeypatch.setattr(PlannedShardWriter, "write", failing)
    start = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        capture_dataset(settings(llama, data, tmp_path / "out", batch_tokens=64))
    assert time.monotonic() - start < 60
    assert list((tmp_path / "out/shards").iterdir()) == []


def test_the_rows_of_a_batch_are_written_as_one_range(llama, data, tmp_path, monkeypatch) -> None:
    forward, write = HuggingFaceEngine.forward, PlannedShardWriter.write
    batches, ranges = [], []

    def noted(self, batch):
        batches.append(sum(batch.positions.lengths))
        return forward(self, batch)

    def counted(self, row_start, rows):
        if "aux_hidden_states" in rows:
            ranges.append((row_start, len(rows["aux_hidden_states"])))
        return write(self, row_start, rows)

    monkeypatch.setattr(HuggingFaceEngine, "forward", noted)
    monkeypatch.setattr(PlannedShardWriter, "write", counted)
    summary = capture_dataset(settings(llama, data, tmp_path / "out", batch_tokens=512))
    assert [count for _, count in ranges] == batches
    assert len(batches) < 20
    ends = [start + count for start, count in ranges]
    assert [start for start, _ in ranges] == [0, *ends[:-1]]
    assert ends[-1] == summary.tokens


def test_a_slow_writer_slows_the_forward_and_no_more_than_its_bound_waits(llama, data, tmp_path, monkeypatch) -> None:
    forward, write = HuggingFaceEngine.forward, PlannedShardWriter.write
    made, written, most = [0], [0], [0]

    def counting(self, batch):
        made[0] += 1
        most[0] = max(most[0], made[0] - written[0])
        return forward(self, batch)

    def slow(self, row_start, rows):
        if "aux_hidden_states" in rows:
            time.sleep(0.02)
            written[0] += 1
        return write(self, row_start, rows)

    monkeypatch.setattr(HuggingFaceEngine, "forward", counting)
    monkeypatch.setattr(PlannedShardWriter, "write", slow)
    capture_dataset(settings(llama, data, tmp_path / "out", exact=True))
    # One being made, one held by the forward's thread, two waiting, one being written.
    assert most[0] <= 5
    assert written[0] == 60


def test_a_run_that_is_asked_to_stop_seals_what_is_complete_and_goes_on_later(llama, data, tmp_path) -> None:
    stopping = Stopping()

    class StopsAfter(Notes):
        seen = 0

        def advanced(self, done: Done) -> None:
            self.seen += done.count if done.tokens else 0
            if self.seen >= 20:
                stopping.ask(signal.SIGTERM)

    same = {"exact": True, "shard_rows": 500}
    with pytest.raises(RunStopped, match="stopped by SIGTERM; run the same command again") as stopped:
        capture_dataset(settings(llama, data, tmp_path / "out", **same), StopsAfter(), stopping)
    assert stopped.value.exit_code == 143
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out/shards").iterdir()}
    assert kept
    assert all(name.endswith(".safetensors") for name in kept)
    assert capture_dataset(settings(llama, data, tmp_path / "out", **same)).captured == 60
    capture_dataset(settings(llama, data, tmp_path / "whole", **same))
    for shard in (tmp_path / "out/shards").iterdir():
        assert shard.read_bytes() == (tmp_path / "whole/shards" / shard.name).read_bytes()
        assert kept.get(shard.name, shard.stat().st_mtime_ns) == shard.stat().st_mtime_ns


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_ends_with_the_signals_code_and_one_line(
    llama, tmp_path, number: signal.Signals, code: int
) -> None:
    rows = write_rows(tmp_path / "long.jsonl", [chat("q", "a" * 400, id=f"{i}") for i in range(1000)])
    command = [sys.executable, "-m", "hiddentap", "capture", "--model", llama, "--data", rows, "--layer-ids", "0,2"]
    options = ["--out", tmp_path / "out", "--shard-rows", "2000", "--exact"]
    process = subprocess.Popen([*map(str, command), *map(str, options)], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list((tmp_path / "out/shards").glob("*.safetensors")), 90)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.splitlines()[-1] == f"hiddentap: stopped by {number.name}; run the same command again to go on from here"
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False
    assert not list((tmp_path / "out/shards").glob("*.open"))


def wait_for(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_second_run_on_the_same_folder_is_refused_while_the_first_works(llama, data, tmp_path) -> None:
    from hiddentap.capture.store import FolderLockedError, OutputFolder

    with OutputFolder(tmp_path / "out").lock(), pytest.raises(FolderLockedError, match=str(os.getpid())):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_a_model_that_raises_ends_the_run_with_that_error_and_it_can_go_on(llama, tmp_path, monkeypatch) -> None:
    data = write_rows(tmp_path / "few.jsonl", CHATS)
    forward, calls = HuggingFaceEngine.forward, []

    def failing(self, batch):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("bad kernel")
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceEngine, "forward", failing)
    with pytest.raises(ValueError, match="bad kernel"):
        capture_dataset(settings(llama, data, tmp_path / "out", exact=True, shard_rows=60))
    assert len(list((tmp_path / "out/shards").iterdir())) >= 1
    assert capture_dataset(settings(llama, data, tmp_path / "out", exact=True, shard_rows=60)).captured == 5
    assert len(CapturedDataset(tmp_path / "out")) == 5
