"""A disk that fills up while the command works on it: a clear end, nothing half done, and it can go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from support.fork_server import ForkServer
from support.model_folder import chat, write_rows
from support.small_disk import small_disk

ROWS = [chat("q" * (i % 7), "a" * (100 + i % 61), id=f"s{i}") for i in range(100)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "12m") as folder:
        yield folder


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "shards").iterdir()}


def test_the_shards_that_fitted_stay_and_the_run_goes_on_once_there_is_room(
    server: ForkServer, llama: Path, disk: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--shard-rows", 2000)
    assert server.run(*command, "--out", tmp_path / "whole").code == 0
    whole = shards(tmp_path / "whole")
    size = sum(map(len, whole.values()))

    other, out = disk / "other", disk / "out"
    other.write_bytes(bytes((12 << 20) - size // 2))
    refused = server.run(*command, "--out", out)
    assert refused.code == 1
    assert "make room, choose another folder, or start anyway with --force" in refused.text

    full = server.run(*command, "--out", out, "--force")
    assert full.code == 1
    (line,) = [line for line in full.text.splitlines() if line.startswith("hiddentap: ")]
    assert "no room for shard-" in line
    assert "sealed shards are kept" in line
    assert "Traceback" not in full.text
    left = shards(out)
    assert 1 <= len(left) < len(whole)
    assert left.items() <= whole.items()

    other.unlink()
    kept = {name: (out / "shards" / name).stat().st_mtime_ns for name in left}
    assert server.run(*command, "--out", out).code == 0
    assert shards(out) == whole
    assert {name: (out / "shards" / name).stat().st_mtime_ns for name in left} == kept
    assert server.run("verify", out, "--model", "none").code == 0


def test_a_disk_too_small_for_the_plan_leaves_none_and_the_run_begins_again(
    server: ForkServer, llama: Path, disk: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--out", disk / "out", "--force")
    (disk / "other").write_bytes(bytes((12 << 20) - 65536))
    full = server.run(*command)
    assert full.code == 1
    assert "no room for" in full.text
    assert "Traceback" not in full.text
    assert [path.name for path in (disk / "out").rglob("*") if path.is_file()] == [".hiddentap-lock"]
    (disk / "other").unlink()
    assert server.run(*command).code == 0
    with safe_open(disk / "out/shards/shard-000000.safetensors", "pt") as shard:
        assert shard.get_slice("sample_index").get_shape() == [100]
