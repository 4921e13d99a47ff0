"""The benchmark as a person runs it, on a tiny model; its figures mean nothing here, sections must come to an end."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/benchmark.py"
# The others are rehearsed with the accelerator check.
SECTIONS = ("operations", "speed", "storage", "growth")


def test_each_section_ends_with_a_table_of_positive_figures(llama: Path, tmp_path: Path) -> None:
    asked = ["--quick", "--model", llama, "--layers", "0,2", "--data", "near", "--folder", tmp_path]
    for section in SECTIONS:
        asked += ["--only", section]
    command = [sys.executable, str(SCRIPT), *map(str, asked), "--json", str(tmp_path / "measured.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads((tmp_path / "measured.json").read_text())["figures"]
    assert {figure["section"] for figure in figures} == set(SECTIONS)
    assert all(value >= 0 for figure in figures for value in figure["values"])
    rows = Counter(
        line.split(" | ")[0].removeprefix("| ") for line in result.stdout.splitlines() if line.startswith("| ")
    )
    assert {section: rows[section] for section in SECTIONS} == Counter(figure["section"] for figure in figures)


@pytest.mark.slow
def test_streamed_weights_are_measured_in_a_memory_group_on_the_same_rows(llama: Path, tmp_path: Path) -> None:
    asked = ["--quick", "--only", "streamed", "--model", llama, "--layers", "0,2", "--folder", tmp_path]
    command = [sys.executable, str(SCRIPT), *map(str, asked), "--json", str(tmp_path / "measured.json")]
    result = subprocess.run(command, capture_output=True, text=True)
    if "no memory control group for the section streamed" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.returncode == 0, result.stderr
    figures = {figure["what"]: figure for figure in json.loads((tmp_path / "measured.json").read_text())["figures"]}
    ways = ("in memory", "streamed weights", "device_map with disk offload")
    assert all(figures[way]["unit"] == "tokens/s" and len(figures[way]["values"]) == 1 for way in ways)
    assert figures["memory of the process, page cache included"]["values"] == [700.0]
    difference = "largest difference to a row in memory / largest value"
    assert figures[f"{difference}, streamed weights"]["values"] == [0.0]
    assert 0 <= figures[f"{difference}, device_map with disk offload"]["values"][0] <= 1e-4
