"""The measurement of long contexts as a person runs it, on a short one: it ends with a row for each run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/long_context.py"


@pytest.mark.slow
def test_it_ends_with_a_table_of_the_whole_run_and_those_in_chunks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--tokens",
        "96",
        "--layers",
        "4",
        "--chunks",
        "32",
        "--work",
        str(tmp_path),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^\| (whole|chunks of 32) \| -?[\d,]+ MB \| \d+ \| (\S+) \|$", said, re.MULTILINE)
    assert [name for name, _ in rows] == ["whole", "chunks of 32"]
    assert float(rows[0][1]) == 0
    assert float(rows[1][1]) < 1e-5
