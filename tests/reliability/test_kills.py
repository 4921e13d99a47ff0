"""SIGKILL at any instant of a run: the same command goes on to the very bytes of a run that nobody killed."""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from hiddentap import CapturedDataset
from support.fork_server import ForkServer
from support.model_folder import chat, write_rows
from support.run_places import STAGES, Place

INSTANTS = 20
SHARDS_AT_LEAST = 5
POISONED = 250  # tokens; no other sample is as long, and the model has 256 positions
MARKS = 21  # tokens of a chat beside its question and its answer, of which each byte is one
ROWS = [chat("q" * (i % 7), "a" * (20 + i % 61), id=f"s{i}") for i in range(150)]
ROWS[70] = chat("q", "a" * (POISONED - MARKS - 1), id="poisoned")
BAD_LINE = 31


def data(folder: Path, chats: int = len(ROWS)) -> Path:
    """150 chats: one holds a sample whose rows go bad in the forward, and one line between them is no JSON."""
    path = write_rows(folder / "rows.jsonl", ROWS[:chats])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[: BAD_LINE - 1], "{bad\n", *lines[BAD_LINE - 1 :]]))
    return path


def tree(out: Path) -> dict[str, bytes]:
    """Every file with its bytes; the lock names the process that held it last."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".hiddentap-lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def sealed(out: Path) -> dict[Path, tuple[int, int]]:
    """The shards under their final names, and what changes when one is written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("shards/*.safetensors")}


class Killed:
    """Runs that are killed, each in a new folder, and what comes of resuming them."""

    def __init__(
        self,
        server: ForkServer,
        llama: Path,
        folder: Path,
        *options: object,
        chats: int = len(ROWS),
        shard_rows: int = 2500,
    ) -> None:
        self._server, self._folder, self._runs = server, folder, 0
        self._command = ("capture", "--model", llama, "--data", data(folder, chats), "--layer-ids", "0,2", "--exact")
        self._command += ("--shard-rows", shard_rows, *options)
        self.hits: Counter[str] = Counter()
        self.seconds = self._whole_run()

    def _whole_run(self) -> float:
        """How long a run takes that nobody kills; its files are what all others must come to."""
        run = self._start(self._folder / "whole")
        assert run.wait().code == 0
        seconds = time.monotonic() - self._place.began
        self.whole = tree(self._folder / "whole")
        assert sum(name.startswith("shards/") for name in self.whole) >= SHARDS_AT_LEAST
        return seconds

    def _start(self, out: Path, **kill: object):
        self._runs += 1
        self._place = Place(self._folder / f"place-{self._runs}")
        given = {"place": str(self._folder / f"place-{self._runs}"), "poison": POISONED, **kill}
        return self._server.start(*self._command, "--out", out, place="watched", given=given)

    def kill_after(self, share: float) -> bool:
        """Kill a run from outside once that share of its time is over; False if it was done before."""
        out = self._folder / "killed"
        run = self._start(out)
        while self._place.began == 0:
            time.sleep(0.001)
        time.sleep(max(self._place.began + share * self.seconds - time.monotonic(), 0))
        os.kill(run.pid, signal.SIGKILL)
        return self._resumed(run, out)

    def kill_in(self, stage: str, step: int) -> bool:
        """A run that kills itself at a step of a stage."""
        out = self._folder / "killed"
        return self._resumed(self._start(out, kill_in=stage, kill_at=step), out)

    def _resumed(self, run, out: Path) -> bool:
        ended = run.wait()
        if ended.code == 0:
            self.seconds = min(self.seconds, time.monotonic() - self._place.began)
            shutil.rmtree(out)
            return False
        assert ended.code == -signal.SIGKILL, ended.text
        self.hits.update(self._place.stages)
        before = sealed(out)
        again = self._start(out).wait()
        assert again.code == 0, again.text
        assert {path: now for path, now in sealed(out).items() if path in before} == before
        assert tree(out) == self.whole
        verified = self._server.run("verify", out, "--model", "none")
        assert verified.code == 0, verified.text
        shutil.rmtree(out)
        return True


@pytest.mark.slow
def test_twenty_kills_over_the_whole_run_lose_nothing_and_repeat_nothing(
    server: ForkServer, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Killed(server, llama, tmp_path)
    for i in range(INSTANTS):
        while not killed.kill_after((i + 0.5) / INSTANTS):
            pass
    by_time = dict(killed.hits)
    for stage in STAGES:
        if stage not in by_time:
            assert killed.kill_in(stage, 3)
    with capsys.disabled():
        shown = ", ".join(f"{stage} {killed.hits[stage]}" for stage in STAGES)
        chosen = sum(killed.hits.values()) - sum(by_time.values())
        sys.stdout.write(f"\nkilled in: {shown} (of these at a chosen step: {chosen})\n")
    assert set(killed.hits) == set(STAGES)


@pytest.mark.slow
def test_twenty_kills_of_a_run_with_streamed_weights_lose_nothing_and_repeat_nothing(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    options = ("--stream-weights", "--block-tokens", 2000)  # three blocks of two shards
    killed = Killed(server, llama, tmp_path, *options, chats=75, shard_rows=1000)
    instants = Random(0)
    for _ in range(INSTANTS):
        while not killed.kill_after(instants.random()):
            pass
    assert {"loading", "forward"} <= set(killed.hits)


# The first and some later steps of what is short beside the forward; a run of this size has more of each.
STEPS = [("tokenising", 151), ("planning", 1), ("planning", 30), ("planning", 55)]
STEPS += [("seal", 1), ("seal", 7), ("manifest", 1), ("manifest", 3), ("manifest", 6)]


@pytest.mark.slow
def test_kills_at_chosen_steps_of_the_short_stages_lose_nothing_either(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    killed = Killed(server, llama, tmp_path)
    assert [killed.kill_in(stage, step) for stage, step in STEPS] == [True] * len(STEPS)
    assert set(killed.hits) == set(STAGES) - {"loading"}


@pytest.mark.slow
def test_what_all_of_them_come_to_is_every_row_once(server: ForkServer, llama: Path, tmp_path: Path) -> None:
    Killed(server, llama, tmp_path)
    dataset = CapturedDataset(tmp_path / "whole")
    ids = [dataset[i]["sample_id"] for i in range(len(dataset))]
    assert ids == [f"s{i}" for i in range(150) if i != 70]
    rejects = [json.loads(line) for line in (tmp_path / "whole/rejects.jsonl").read_text().splitlines()]
    assert [(reject["line"], reject["id"]) for reject in rejects] == [(BAD_LINE, None), (72, "poisoned")]
