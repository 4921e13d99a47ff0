"""Kills and full disks: whatever the instant, a readable file is a whole file."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hiddentap.capture.store import (
    Column,
    DiskFullError,
    GrowingShardWriter,
    Manifest,
    OutputFolder,
    Plan,
    PlanError,
    PlannedShardWriter,
    PlanWriter,
    Shard,
)
from hiddentap.capture.store.diskio import write_atomically
from support.shards import COLUMNS, names, planned, rows_of, write_plan, write_shard
from support.small_disk import small_disk as mounted_disk

NAME = "shard-000000.safetensors"
TESTS = Path(__file__).parent.parent

# Runs one piece of work again and again in forked children; child n is killed at its n-th call of the system that
# changes the disk, half-way through it where it writes. Ends with the first child that is through before its n-th call.
KILL_AT_EVERY_CALL = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.shards import COLUMNS, planned, rows_of, write_plan, write_shard
from hiddentap.capture.store import GrowingShardWriter, Manifest

def grow(folder):
    with GrowingShardWriter(folder / "shard-000000.safetensors", COLUMNS, {"model": "m"}) as writer:
        for i, (start, stop) in enumerate(((0, 3), (3, 8))):
            sample = writer.begin(i, f"s{i}", "data.jsonl", i + 1)
            writer.append(sample, {name: tensor[start:stop] for name, tensor in rows_of(8).items()})
        writer.seal()

def manifest(folder):
    Manifest.from_shards({"run": "new"}, {}, [], complete=True).write(folder / "manifest.json")

WORK = {
    "planned": lambda folder: write_shard(folder / "shard-000000.safetensors", 3, 5),
    "rejects": lambda folder: write_shard(folder / "shard-000000.safetensors", 3, 5, 4, rejected=(2,)),
    "growing": grow,
    "plan": lambda folder: write_plan(folder / "plan", 3, 5),
    "manifest": manifest,
}

def armed(function, limit):
    def call(*arguments, **options):
        armed.calls += 1
        if armed.calls == limit:
            if function.__name__ == "pwrite":
                fd, data, offset = arguments
                function(fd, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
armed.calls = 0

limit = 0
while True:
    limit += 1
    folder = Path(sys.argv[2]) / str(limit)
    folder.mkdir()
    if sys.argv[3] == "manifest":
        Manifest.from_shards({"run": "old"}, {}, [], complete=False).write(folder / "manifest.json")
    child = os.fork()
    if child == 0:
        for name in ("open", "pwrite", "fsync", "posix_fallocate", "close"):
            setattr(os, name, armed(getattr(os, name), limit))
        for name in ("replace", "unlink"):
            setattr(Path, name, armed(getattr(Path, name), limit))
        WORK[sys.argv[3]](folder)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def killed_everywhere(tmp_path: Path, work: str) -> list[Path]:
    """One folder per kill, in order of the instants; the last one saw no kill."""
    subprocess.run([sys.executable, "-c", KILL_AT_EVERY_CALL, str(TESTS), str(tmp_path), work], check=True)
    folders = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    assert len(folders) > 5
    return folders


@pytest.mark.parametrize(("work", "rows"), [("planned", 8), ("rejects", 7), ("growing", 8)])
def test_a_kill_at_any_call_leaves_no_shard_or_a_whole_one_and_a_rerun_repairs(
    tmp_path: Path, work: str, rows: int
) -> None:
    expected = rows_of(rows)
    whole = 0
    for folder in killed_everywhere(tmp_path, work):
        path = folder / NAME
        if path.exists():
            whole += 1
            with safe_open(path, "pt") as file:
                for name, tensor in expected.items():
                    assert torch.equal(file.get_tensor(name), tensor)
        (folder / "shards").mkdir()
        for left in folder.glob("shard-*"):
            left.rename(folder / "shards" / left.name)
        output = OutputFolder(folder)
        assert output.sealed_shards().broken == {}
        output.remove_stray_files()
        assert names(output.shards) == ([NAME] if output.sealed_shards().shards else [])
        write_shard(output.shard_path(0), 3, 5)
    assert whole >= 2


def test_a_kill_at_any_call_leaves_no_plan_or_a_whole_one_and_a_rerun_repairs(tmp_path: Path) -> None:
    for folder in killed_everywhere(tmp_path, "plan"):
        if (folder / "plan" / "plan.json").exists():
            assert Plan(folder / "plan").input_ids(1).tolist() == [10, 11, 12, 13, 14]
            assert Plan(folder / "plan").check() == []
        else:
            with pytest.raises(PlanError, match="is no sealed plan"):
                Plan(folder / "plan")
            assert write_plan(folder / "plan", 3, 5).check() == []


def test_a_kill_at_any_call_leaves_the_old_manifest_or_the_new_one(tmp_path: Path) -> None:
    runs = [
        Manifest.read(folder / "manifest.json").identity["run"] for folder in killed_everywhere(tmp_path, "manifest")
    ]
    assert set(runs) == {"old", "new"}
    assert runs == sorted(runs, reverse=True)


def test_data_and_header_are_on_disk_before_the_length_and_the_length_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, samples = planned(3)
    events: list[str] = []
    pwrite, fsync, replace = os.pwrite, os.fsync, Path.replace

    def watched_pwrite(fd: int, data: bytes, offset: int) -> int:
        events.append({0: "length", 8: "header"}.get(offset, "data"))
        return pwrite(fd, data, offset)

    def watched_fsync(fd: int) -> None:
        events.append("sync folder" if Path(f"/proc/self/fd/{fd}").is_dir() else "sync")
        fsync(fd)

    def watched_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer:
        writer.write(0, rows_of(3))
        monkeypatch.setattr(os, "pwrite", watched_pwrite)
        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(Path, "replace", watched_replace)
        writer.seal()
    assert events[events.index("header") :] == ["header", "sync", "length", "sync", "rename", "sync folder"]
    assert set(events[: events.index("header")]) == {"data"}


WRITE_FOREVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.shards import write_shard
print("go", flush=True)
for index in range(100_000):
    write_shard(Path(sys.argv[2]) / f"shard-{index:06d}.safetensors", 300, 500, 40, rejected=(1,) if index % 3 == 0 else ())
"""


@pytest.mark.parametrize("delay", [0.05, 0.11, 0.23])
def test_a_real_kill_while_shards_are_written_one_after_the_other(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(TESTS), str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    sealed = sorted(tmp_path.glob("shard-*.safetensors"))
    for path in sealed:
        with safe_open(path, "pt") as file:
            assert int(file.get_tensor("input_ids")[-1]) == 939
    unsealed = set(names(tmp_path)) - {path.name for path in sealed}
    assert all(name.endswith((".open", ".rewrite")) for name in unsealed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted_disk(tmp_path / "disk", "4m") as folder:
        yield folder


BIG = (Column("aux_hidden_states", torch.float32, (1024,)),)


def test_a_planned_shard_that_does_not_fit_is_refused_at_once_with_both_numbers(small_disk: Path) -> None:
    write_shard(small_disk / NAME, 3, 5)
    shard, samples = planned(2000)
    with pytest.raises(
        DiskFullError, match=r"no room for shard-000001.safetensors in .*: 8\d{6} bytes needed, 4\d{6} free"
    ):
        PlannedShardWriter(small_disk / "shard-000001.safetensors", shard, samples, BIG, {})
    assert names(small_disk) == [NAME]
    assert Shard(small_disk / NAME).rows("input_ids", 0, 2).tolist() == [100, 101]


def test_a_rewrite_that_does_not_fit_leaves_nothing_half_done_and_can_be_repeated(small_disk: Path) -> None:
    shard, samples = planned(300, 301)
    with PlannedShardWriter(small_disk / NAME, shard, samples, BIG, {}) as writer:
        writer.write(0, {"aux_hidden_states": torch.zeros(601, 1024)})
        (small_disk / "other").write_bytes(bytes(1 << 20))
        writer.reject(0, "bad")
        with pytest.raises(DiskFullError):
            writer.seal()
        assert not (small_disk / NAME).exists()
        (small_disk / "other").unlink()
        assert writer.seal().M == 1
    assert names(small_disk) == [NAME]


def test_a_growing_shard_that_fills_the_disk_ends_in_an_error_and_no_file(small_disk: Path) -> None:
    write_shard(small_disk / NAME, 3, 5)
    with (
        pytest.raises(DiskFullError, match=r"no room for shard-000001.safetensors.aux_hidden_states.spool"),
        GrowingShardWriter(small_disk / "shard-000001.safetensors", BIG, {}) as writer,
    ):
        grow_by_rows(writer, 10_000)
    assert names(small_disk) == [NAME]


def test_a_plan_and_a_manifest_on_a_full_disk(small_disk: Path) -> None:
    write_atomically(small_disk / "manifest.json", b"old")
    with (
        pytest.raises(DiskFullError, match=r"no room for \w+.safetensors"),
        PlanWriter(small_disk / "plan") as writer,
    ):
        plan_tokens(writer, 2_000_000)
    assert names(small_disk / "plan") == []
    (small_disk / "other").write_bytes(bytes((4 << 20) - 8192))
    with pytest.raises(DiskFullError, match=r"no room for manifest.json"):
        write_atomically(small_disk / "manifest.json", bytes(1 << 20))
    assert (small_disk / "manifest.json").read_bytes() == b"old"
    assert names(small_disk) == ["manifest.json", "other", "plan"]


def grow_by_rows(writer: GrowingShardWriter, rows: int) -> None:
    sample = writer.begin(0, "x")
    for _ in range(rows // 100):
        writer.append(sample, {"aux_hidden_states": torch.ones(100, 1024)})


def plan_tokens(writer: PlanWriter, tokens: int) -> None:
    for line in range(1, tokens // 50_000 + 1):
        writer.add(range(50_000), [1] * 50_000, sample_id="x", source=0, line=line)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_size_limit_is_told_as_a_full_disk(tmp_path: Path) -> None:
    shard, samples = planned(2000)
    with file_size_limit(1 << 20), pytest.raises(DiskFullError, match="File too large") as caught:
        PlannedShardWriter(tmp_path / NAME, shard, samples, BIG, {})
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    with (
        file_size_limit(1 << 20),
        pytest.raises(DiskFullError),
        GrowingShardWriter(tmp_path / NAME, BIG, {}) as writer,
    ):
        writer.append(writer.begin(0, "x"), {"aux_hidden_states": torch.zeros(2000, 1024)})
    assert names(tmp_path) == []


def test_a_quota_that_speaks_up_at_the_seal_is_told_as_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    def refused(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    shard, samples = planned(3)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, BIG, {}) as writer:
        writer.write(0, {"aux_hidden_states": torch.zeros(3, 1024)})
        monkeypatch.setattr("hiddentap.capture.store.diskio.os.fsync", refused)
        with pytest.raises(DiskFullError, match=r"no room for shard-000000.safetensors .*quota"):
            writer.seal()
    assert names(tmp_path) == []


def test_the_disk_begins_with_what_is_written_long_before_the_seal(tmp_path: Path, monkeypatch) -> None:
    advised: list[tuple[int, int]] = []
    advice = os.posix_fadvise

    def noted(fd: int, offset: int, length: int, kind: int) -> None:
        assert kind == os.POSIX_FADV_DONTNEED
        advised.append((offset, length))
        advice(fd, offset, length, kind)

    monkeypatch.setattr("hiddentap.capture.store.diskio.os.posix_fadvise", noted)
    monkeypatch.setattr("hiddentap.capture.store.diskio.WRITE_BACK_BYTES", 3 * 4096)
    shard, samples = planned(10)
    rows = torch.arange(10 * 1024, dtype=torch.float32).view(10, 1024)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, BIG, {}) as writer:
        for row in range(10):
            writer.write(row, {"aux_hidden_states": rows[row : row + 1]})
            assert len(advised) == (row + 1) // 3 * 3
        sealed = writer.seal()
    (start, length), *_ = advised
    assert [offset - start for offset, _ in advised] == [4096 * row for row in range(9)]
    assert length == 4096
    assert torch.equal(sealed.rows("aux_hidden_states", 0, 10), rows)
