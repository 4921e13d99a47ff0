"""The output folder: who may write, what is left over, what is sealed."""

import errno
import json
import os
import signal
import subprocess
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest

from hiddentap.capture.store import FolderLockedError, Manifest, OutputFolder, Reject
from hiddentap.capture.store.diskio import UnsealedFile
from hiddentap.models.errors import RunError, UsageError
from support.shards import names, open_files, write_plan, write_shard

HOLD = """
import os, sys, time
from pathlib import Path
from hiddentap.capture.store import OutputFolder
with OutputFolder(Path(sys.argv[1])).lock():
    if sys.argv[2] == "fork" and os.fork() == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path, how: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused_by_process_and_host_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    process = holder(folder.path, "alone")
    try:
        with (
            pytest.raises(FolderLockedError, match=rf"out is being written by process {process.pid} on "),
            folder.lock(),
        ):
            pass
    finally:
        process.kill()
        process.wait()
    with folder.lock():
        pass


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    process = holder(folder.path, "fork")
    try:
        process.kill()
        process.wait()
        with folder.lock():
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_the_same_process_is_refused_too_and_may_lock_again_afterwards(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with folder.lock(), pytest.raises(FolderLockedError, match=f"process {os.getpid()} on"), folder.lock():
        pass
    with folder.lock():
        assert names(folder.path) == [".hiddentap-lock", "shards"]


def test_while_one_process_of_a_run_lives_the_folder_is_not_another_runs(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with ExitStack() as second:
        with folder.lock() as lock:
            with pytest.raises(FolderLockedError, match=f"by process {os.getpid()} on"), folder.join(lock.claim):
                pass
            lock.share()
            second.enter_context(folder.join(lock.claim))
        with pytest.raises(FolderLockedError, match=r"on \S+ or by other processes of its run; wait"), folder.lock():
            pass
    with folder.lock():
        pass


def test_a_process_that_comes_late_does_not_join_the_next_run(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with folder.lock() as lock:
        lock.share()
    with folder.lock() as other:
        other.share()
        with pytest.raises(FolderLockedError, match="is being written by process"), folder.join(lock.claim):
            pass
    with pytest.raises(FolderLockedError, match="is being written by process"), folder.join(lock.claim):
        pass


def test_a_lock_that_another_run_took_meanwhile_is_not_shared(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with folder.lock() as lock:
        (folder.path / ".hiddentap-lock").write_text('{"pid": 7, "host": "elsewhere", "claim": "theirs"}')
        with pytest.raises(FolderLockedError, match="is being written by process 7 on elsewhere;"):
            lock.share()


def test_a_folder_that_is_not_there_for_every_process_is_no_shared_one(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with pytest.raises(RunError, match="on a shared file system"), folder.join("claim"):
        pass
    assert not folder.path.exists()


def test_a_folder_of_others_and_a_file_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    (tmp_path / "thesis" / "manifest.json").write_text("{}")
    with (
        pytest.raises(UsageError, match="is not empty and was not made by hiddentap"),
        OutputFolder(tmp_path / "thesis").lock(),
    ):
        pass
    assert names(tmp_path / "thesis") == ["chapter.txt", "manifest.json"]
    with pytest.raises(UsageError, match="is a file"), OutputFolder(tmp_path / "thesis" / "chapter.txt").lock():
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            UsageError, match=rf"out cannot be made, because {tmp_path}/file is a file; choose another folder\.$"
        ),
        OutputFolder(tmp_path / "file" / "out").lock(),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"xx cannot be made \(File name too long\); choose another folder\.$"),
        OutputFolder(tmp_path / ("x" * 300)).lock(),
    ):
        pass


def test_a_folder_that_may_not_be_written_is_refused_in_the_systems_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/of/ours")

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr("tempfile.mkdtemp", refused)
    folder, text = (
        OutputFolder(tmp_path / "out"),
        r"out cannot be written or locked \(Permission denied\); choose another folder\.$",
    )
    with pytest.raises(UsageError, match=text), folder.lock():
        pass
    with pytest.raises(UsageError, match=text):
        folder.require_usable()


def test_an_error_under_the_lock_passes_through_and_frees_it(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with pytest.raises(OSError, match="mine"), folder.lock():
        raise OSError("mine")
    with folder.lock():
        pass


def test_a_copy_of_an_output_without_its_lock_file_is_ours(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    Manifest.from_shards({}, {}, [], complete=False).write(folder.manifest_path)
    with folder.lock():
        pass


def test_only_what_a_killed_run_leaves_is_stray(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    ours = [
        "shards/shard-000001.safetensors.open",
        "shards/shard-000001.safetensors.rewrite",
        "shards/shard-000002.safetensors.aux_hidden_states.spool",
        "manifest.json.tmp",
        "rejects.jsonl.tmp",
        "plan/plan.json.tmp",
        "plan/lengths.safetensors.open",
        "plan/input_ids.safetensors",
    ]
    others = [
        "shards/notes.open",
        "shards/my-shard-000001.safetensors.open",
        "shards/shard-000001.safetensors.open.bak",
        "plan/readme",
        "a.tmp",
    ]
    with folder.lock():
        folder.plan.mkdir()
        write_shard(folder.shard_path(0), 3)
        for name in ours + others:
            (folder.path / name).write_bytes(b"x")
        assert folder.stray_files() == sorted(folder.path / name for name in ours)
        assert folder.remove_stray_files() == sorted(folder.path / name for name in ours)
        assert folder.stray_files() == []
    assert all((folder.path / name).exists() for name in [*others, "shards/shard-000000.safetensors"])


def test_what_a_process_that_is_gone_left_of_a_shard_is_removed_and_a_shard_in_the_making_is_not(
    tmp_path: Path,
) -> None:
    folder = OutputFolder(tmp_path)
    folder.shards.mkdir()
    gone, other = UnsealedFile(folder.shard_path(3)), UnsealedFile(folder.shard_path(4))
    with pytest.raises(RunError, match=r"shard-000003.safetensors.open is being written by another process"):
        folder.remove_unsealed(3)
    os.close(gone.fd)  # as the end of its process does
    folder.remove_unsealed(3)
    assert names(folder.shards) == ["shard-000004.safetensors.open"]
    other.discard()


def test_files_of_a_sealed_plan_are_not_stray(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    write_plan(folder.plan, 3)
    assert folder.stray_files() == []


def test_sealed_and_broken_shards_are_told_apart_and_not_touched(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.shards.mkdir()
    for index in range(4):
        write_shard(folder.shard_path(index), 3, 2)
    os.truncate(folder.shard_path(1), folder.shard_path(1).stat().st_size - 1)
    (folder.shards / "shard-000007.safetensors.open").write_bytes(folder.shard_path(0).read_bytes())
    data = bytearray(folder.shard_path(3).read_bytes())
    data[:8] = bytes(8)
    folder.shard_path(3).write_bytes(data)
    before = {path.name: path.stat().st_mtime_ns for path in folder.shards.iterdir()}
    found = folder.sealed_shards()
    assert sorted(found.shards) == [0, 2]
    assert sorted(found.broken) == [1, 3]
    assert "truncated" in str(found.broken[1])
    assert "not sealed" in str(found.broken[3])
    assert found.shards[2].rows("input_ids", 0, 2).tolist() == [100, 101]
    assert {path.name: path.stat().st_mtime_ns for path in folder.shards.iterdir()} == before


def test_thousands_of_sealed_shards_hold_no_file_handles(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.shards.mkdir()
    for index in range(20):
        write_shard(folder.shard_path(index), 3)
    found = folder.sealed_shards()
    assert len(found.shards) == 20
    assert open_files(tmp_path) == 0


def test_rejects_are_one_line_each_in_input_order_however_often_they_are_written(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    rejects = [
        Reject("b.jsonl", 1, "x", "non-finite", {"layer": 2}, 5),
        Reject("a.jsonl", 10, None, "bad JSON"),
        Reject("a.jsonl", 9, "line\nbreak", "empty"),
    ]
    for _ in range(2):
        written = folder.write_rejects(rejects)
        assert written == f"{zlib.crc32(folder.rejects_path.read_bytes()):08x}"
    lines = [json.loads(line) for line in folder.rejects_path.read_text().splitlines()]
    assert lines == [
        {"source": "a.jsonl", "line": 9, "id": "line\nbreak", "reason": "empty"},
        {"source": "a.jsonl", "line": 10, "id": None, "reason": "bad JSON"},
        {"source": "b.jsonl", "line": 1, "id": "x", "reason": "non-finite", "detail": {"layer": 2}, "sample_index": 5},
    ]
    assert folder.read_rejects() == [rejects[2], rejects[1], rejects[0]]


def test_reading_rejects_of_a_folder_without_any_gives_none(tmp_path: Path) -> None:
    assert OutputFolder(tmp_path).read_rejects() == []


@pytest.mark.parametrize("out", ["link", "link/inside"])
def test_a_link_to_nothing_is_refused_by_name(tmp_path: Path, out: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    text = f"{tmp_path}/link is a link to {tmp_path}/gone, which does not exist; make that folder, or give another one."
    with pytest.raises(UsageError) as caught, OutputFolder(tmp_path / out).lock():
        pass
    assert str(caught.value) == text
    (tmp_path / "gone").mkdir()
    with OutputFolder(tmp_path / out).lock():
        assert (tmp_path / "gone").is_dir()
