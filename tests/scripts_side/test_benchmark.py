"""The benchmark as a person runs it, on a tiny model; its figures mean nothing here, sections must come to an end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/benchmark.py"


@pytest.mark.parametrize("section", ["operations", "speed", "storage", "growth"])
def test_each_section_ends_with_a_table_of_positive_figures(section: str, llama: Path, tmp_path: Path) -> None:
    asked = ("--quick", "--model", llama, "--layers", "0,2", "--data", "near", "--only", section, "--folder", tmp_path)
    command = [sys.executable, str(SCRIPT), *map(str, asked), "--json", str(tmp_path / "measured.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads((tmp_path / "measured.json").read_text())["figures"]
    assert {figure["section"] for figure in figures} == {section.replace("-", " ")}
    assert all(value >= 0 for figure in figures for value in figure["values"])
    assert sum(line.startswith(f"| {section.replace('-', ' ')} |") for line in result.stdout.splitlines()) == len(
        figures
    )
