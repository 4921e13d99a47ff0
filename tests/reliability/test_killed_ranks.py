"""The first of several processes is killed: the others keep the folder for their run, and the next one takes up what was lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from support.fork_server import ForkServer
from support.model_folder import chat, write_rows

pytestmark = pytest.mark.slow

ROWS = [chat("q", "a" * (20 + i % 31), id=f"s{i}") for i in range(60)]


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def sealed(out: Path) -> dict[str, tuple[int, int]]:
    """The shards under their final names, and what changes when one is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("shards/*.safetensors")}


def test_a_run_whose_first_rank_was_killed_keeps_others_out_goes_on_and_is_taken_up_again(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out"
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--shard-rows", 200)
    assert server.run(*command, "--out", tmp_path / "whole").code == 0
    whole = sorted((tmp_path / "whole/shards").iterdir())
    first, second = server.start_ranks(2, *command, "--out", out, then={"slow_disk": {"seconds": 0.05}})
    wait_for(lambda: len(sealed(out)) >= 2)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL

    refused = server.run(*command, "--out", out)
    assert refused.code != 0
    assert f"is being written by process {first.pid} on" in refused.text
    assert "or by other processes of its run" in refused.text
    assert second.lives()

    wait_for(lambda: any(key.endswith("all shards are sealed") for key in server.store.list_keys()))
    left = {path.name for path in whole} - sealed(out).keys()
    assert 1 <= len(left) <= 3  # one filled, one being sealed and one opened by the process that was killed
    assert {path.name.removesuffix(".open") for path in out.glob("shards/*.open")} <= left
    assert json.loads((out / "manifest.json").read_text())["complete"] is False
    before = sealed(out)
    os.kill(second.pid, signal.SIGTERM)
    assert second.ended_within(60).code == 128 + signal.SIGTERM

    assert server.run(*command, "--out", out).code == 0
    assert {name: now for name, now in sealed(out).items() if name in before} == before
    for shard in whole:
        assert shard.read_bytes() == (out / "shards" / shard.name).read_bytes()
    assert len(CapturedDataset(out)) == 60


def test_torchrun_ends_the_others_when_the_first_is_killed_and_the_same_command_goes_on(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    rows = [chat("q", "a" * 150, id=f"{i}") for i in range(3000)]
    data, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--shard-rows", 9000)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "hiddentap"]
    run = subprocess.Popen([*torchrun, *map(str, command), "--out", str(out)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(sealed(out)) >= 2, 90)
        os.kill(json.loads((out / ".hiddentap-lock").read_text())["pid"], signal.SIGKILL)
        run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode != 0
    before = sealed(out)
    assert server.run(*command, "--out", out).code == 0
    assert {name: now for name, now in sealed(out).items() if name in before} == before
    assert len(CapturedDataset(out)) == 3000
    assert server.run("verify", out, "--model", "none").code == 0
