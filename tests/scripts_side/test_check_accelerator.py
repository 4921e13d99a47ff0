"""The accelerator check, rehearsed on the CPU with tiny models: every part comes to an end and leaves its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarking.device import busy_time

SCRIPT = Path(__file__).parents[2] / "scripts/check_accelerator.sh"


@pytest.mark.slow
def test_its_rehearsal_leaves_figures_and_a_table(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [SCRIPT, "--device", "cpu", "--quick", "--out", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = {
        "llama-device": {"device", "generation"},
        "moe-device": {"device", "generation"},
        "llama-early-stop": {"early stop"},
        "llama-memory": {"memory"},
        "llama-speed": {"speed"},
    }
    figures = {}
    for name, sections in expected.items():
        measured = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert {figure["section"] for figure in measured["figures"]} == sections
        assert all(value >= 0 for figure in measured["figures"] for value in figure["values"])
        assert "bfloat16" in measured["about"]["model"]
        figures[name] = {figure["what"]: figure["median"] for figure in measured["figures"]}
    memory = figures["llama-memory"]
    # 287,552 weights of 2 bytes, and frequencies; 256 positions of three states of 64 values of 2 bytes.
    assert memory["weights of the model"] == pytest.approx(0.5751, abs=0.001)
    assert memory["states of a batch of 256 positions"] == 0.098304
    assert memory["memory above the model, hiddentap, eager"] > memory["states of a batch of 256 positions"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert [f"## {name}" in table for name in expected] == [True] * 5
    assert "| memory | memory above the model, hiddentap, eager | near |" in table


def test_time_in_which_two_things_run_counts_once() -> None:
    assert busy_time([]) == 0
    assert busy_time([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7
