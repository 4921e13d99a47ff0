"""Two processes that want to fill one folder."""

import os
import signal
import time
from pathlib import Path

from hiddentap import CapturedDataset
from support.fork_server import ForkServer
from support.model_folder import chat, write_rows

ROWS = [chat("q", "a" * (20 + i % 31), id=f"s{i}") for i in range(60)]


def wait_for_a_shard(out: Path) -> None:
    end = time.monotonic() + 60
    while not list(out.glob("shards/*.safetensors")):
        assert time.monotonic() < end, "no shard came"
        time.sleep(0.01)


def test_the_second_is_refused_while_the_first_lives_and_may_go_on_when_it_is_killed(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out"
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--shard-rows", 200)
    command += ("--out", out)
    first = server.start(*command, place="slow_disk", given={"seconds": 0.2})
    wait_for_a_shard(out)
    second = server.run(*command)
    assert second.code != 0
    (line,) = [line for line in second.text.splitlines() if line.startswith("hiddentap: ")]
    assert f"is being written by process {first.pid} on" in line
    os.kill(first.pid, 0)
    assert not (out / "rejects.jsonl").exists()

    os.kill(first.pid, signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    assert server.run(*command).code == 0
    dataset = CapturedDataset(out)
    assert [dataset[i]["sample_id"] for i in range(len(dataset))] == [f"s{i}" for i in range(60)]
    assert server.run("verify", out, "--model", llama).code == 0


def test_of_two_that_start_together_one_does_all_and_the_other_nothing(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out"
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--out", out)
    given = {"place": "slow_disk", "given": {"seconds": 0.05}}
    runs = [server.start(*command, **given) for _ in range(2)]
    ended = sorted((run.wait() for run in runs), key=lambda end: end.code)
    assert ended[0].code == 0
    assert ended[1].code != 0
    assert "is being written by process" in ended[1].text
    assert len(CapturedDataset(out)) == 60
    assert server.run("verify", out, "--model", "none").code == 0
