"""An exact run gives the same bytes wherever and however fast it runs."""

import sys
from pathlib import Path

import pytest

from hiddentap.capture.cli import main
from support.fork_server import ForkServer
from support.model_folder import chat, write_rows

ROWS = [chat("q" * (i % 5), "a" * (20 + i % 37), id=f"s{i}") for i in range(40)]


def tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".hiddentap-lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture
def command(llama: Path, tmp_path: Path) -> tuple[str, ...]:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    options = ("--layer-ids", "0,2", "--final", "both", "--exact", "--shard-rows", "600")
    return ("capture", "--model", str(llama), "--data", str(data), *options)


def test_another_process_and_a_slow_disk_change_no_byte(
    server: ForkServer, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hiddentap", *command, "--out", str(tmp_path / "here"), "--quiet"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    here = tree(tmp_path / "here")
    assert sum(name.startswith("shards/") for name in here) >= 4

    assert server.run(*command, "--out", tmp_path / "elsewhere").code == 0
    assert tree(tmp_path / "elsewhere") == here
    slow = server.run(*command, "--out", tmp_path / "slow", place="slow_disk", given={"seconds": 0.03})
    assert slow.code == 0
    assert tree(tmp_path / "slow") == here
