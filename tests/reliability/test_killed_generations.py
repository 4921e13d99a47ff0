"""SIGKILL at any instant of a generation: the same command goes on to the very bytes of a run that nobody killed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset
from support.fork_server import ForkServer
from support.model_folder import write_rows

ROWS = [{"id": f"r{i}", "text": "Once upon a time"[: 3 + i % 14]} for i in range(24)] + [{"nothing": 1}]
# Every shard is due to hold two or three prompts, which come to their ends in another order than they began in.
STEPS = ("--max-new-tokens", 12, "--shard-rows", 60, "--max-batch", 2, "--layer-ids", "0,2")
GREEDY = ("--temperature", 0)
SEEDED = ("--temperature", 1.3, "--seed", 5, "--sampling-mask", "--logprobs", "--top-logits", 2, "--top-k", 9)
QUESTIONS = ("Name three rivers.", "What is a fjord?", "Why is the sky blue?", "Say hello.", "Count to five.")


def talk(place: int, questions: Sequence[str] = ("Hm?", "Why?", "So?")) -> dict[str, Any]:
    """A conversation of two turns."""
    messages = []
    for turn in range(2):
        messages.append({"role": "user", "content": questions[(place + turn) % len(questions)]})
        messages.append({"role": "assistant", "content": "Yes."})
    return {"id": f"t{place}", "messages": messages}


def first_layers(folder: Path, count: int, to: Path) -> Path:
    """Copy a model with its tokenizer and template, and of its decoder layers the first `count`."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=count).save_pretrained(to)
    return to


def tree(out: Path) -> dict[str, bytes]:
    """Every file with its bytes; the lock names the process that held it last."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".hiddentap-lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


class Generations:
    """Runs of one command, each in a new folder."""

    def __init__(self, server: ForkServer, folder: Path, *command: Any) -> None:
        self._server, self._folder, self._command = server, folder, ("generate", *command)
        began = time.monotonic()
        assert self.start("whole").wait().code == 0
        self.seconds = time.monotonic() - began
        self.whole = tree(folder / "whole")

    def start(self, name: str) -> Any:
        return self._server.start(*self._command, "--out", self._folder / name)

    def kill_at_random_instants(self, count: int, chosen: random.Random) -> None:
        """Kill a run, the one that resumes it, the next, until so many died; the last resumes to the end.

        A run that is over before its instant came has the bytes of the whole one, and the next begins anew.
        """
        out, kept = self._folder / "killed", dict[Path, int]()
        while count:
            run = self.start("killed")
            # Later instants would mostly find it over: a resumed run has less to do, and reaches its last stages by then.
            time.sleep(chosen.uniform(0.1, 0.7) * self.seconds)
            if run.lives():
                os.kill(run.pid, signal.SIGKILL)
            ended = run.wait()
            assert ended.code in (0, -signal.SIGKILL), ended.text
            assert {path: path.stat().st_ino for path in kept} == kept
            if ended.code == 0:
                assert tree(out) == self.whole
                shutil.rmtree(out)
                kept = {}
            else:
                count -= 1
                kept = self._sealed(out)
        ended = self.start("killed").wait()
        assert ended.code == 0, ended.text
        assert tree(out) == self.whole
        assert {path: path.stat().st_ino for path in kept} == kept

    def _sealed(self, out: Path) -> dict[Path, int]:
        """Return the shards and pieces of answers there, which have the bytes of the whole run's already."""
        sealed = [*out.glob("shards/*.safetensors"), *out.glob("answers/answers-*.jsonl")]
        assert all(path.read_bytes() == self.whole[str(path.relative_to(out))] for path in sealed)
        return {path: path.stat().st_ino for path in sealed}

    def kill_with(self, files: str, count: int) -> None:
        """Kill a run once so many such files are sealed, and see what the same command makes of its folder."""
        assert any(
            self._killed_with(files, count) for _ in range(9)
        )  # a run may be over before this process runs again

    def _killed_with(self, files: str, count: int) -> bool:
        run = self.start("killed")
        while run.lives() and len(list((self._folder / "killed").glob(files))) < count:
            time.sleep(0.001)
        return self._killed(run)

    def _killed(self, run: Any) -> bool:
        if run.lives():
            os.kill(run.pid, signal.SIGKILL)
        killed = run.wait().code == -signal.SIGKILL
        out = self._folder / "killed"
        sealed = self._sealed(out)
        again = self.start("killed").wait()
        assert again.code == 0, again.text
        assert tree(out) == self.whole
        assert {path: path.stat().st_ino for path in sealed} == sealed
        shutil.rmtree(out)
        return killed


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_killed_generation_goes_on_to_the_same_bytes(
    server: ForkServer, llama: Path, tmp_path: Path, sampling: tuple[Any, ...]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    runs = Generations(server, tmp_path, "--model", llama, "--data", data, *STEPS, *sampling)
    assert sum(name.startswith("shards/") for name in runs.whole) >= 8
    runs.kill_with("shards/*.safetensors", 1)
    runs.kill_with("shards/*.safetensors", 5)
    assert len(CapturedDataset(tmp_path / "whole")) == 24
    assert len((tmp_path / "whole/rejects.jsonl").read_text().splitlines()) == 1


def test_a_killed_regeneration_goes_on_to_the_same_bytes(server: ForkServer, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [talk(i) for i in range(24)])
    turns = ("--turns", "all", "--temperature", 1.1, "--seed", 2, "--max-batch", 1)
    runs = Generations(server, tmp_path, "--model", llama, "--data", data, *STEPS[:4], *STEPS[6:], *turns)
    assert sum("answers-" in name for name in runs.whole) == 3
    runs.kill_with("answers/answers-*.jsonl", 1)
    runs.kill_with("plan/*", 1)
    assert len(CapturedDataset(tmp_path / "whole")) == 24


@pytest.mark.slow
@pytest.mark.smollm2
def test_kills_at_random_instants_of_a_generation_of_smollm2(
    server: ForkServer, smollm2_folder: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [talk(i, QUESTIONS) for i in range(6)])
    steps = ("--layer-ids", "1,14,26", "--max-new-tokens", 4, "--shard-rows", 150, "--max-batch", 2)
    runs = Generations(server, tmp_path, "--model", smollm2_folder, "--data", data, *steps, *SEEDED)
    assert sum(name.startswith("shards/") for name in runs.whole) >= 2
    runs.kill_at_random_instants(4, random.Random(8))


@pytest.mark.slow
@pytest.mark.smollm2
def test_ten_kills_at_random_instants_of_a_regeneration_of_smollm2s_first_layers(
    server: ForkServer, smollm2_folder: Path, tmp_path: Path
) -> None:
    model = first_layers(smollm2_folder, 6, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [talk(i, QUESTIONS) for i in range(9)])
    turns = ("--turns", "all", "--max-new-tokens", 2, "--max-batch", 1, "--temperature", 1, "--seed", 3)
    runs = Generations(server, tmp_path, "--model", model, "--data", data, "--layer-ids", "1,3,5", *turns)
    assert sum("answers-" in name for name in runs.whole) == 2
    runs.kill_at_random_instants(10, random.Random(8))
