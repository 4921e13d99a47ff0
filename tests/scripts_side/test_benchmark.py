"""The benchmark as a person runs it, on a tiny model; its figures mean nothing here, sections must come to an end."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

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
