"""The tour of the code names files that exist, and names that are in them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "code-tour.md").read_text(encoding="utf-8")
WALKS = ["Walk 1: a layer id", "Walk 2: an input record", "Walk 3: a row of a forward"]
CHANGES = [
    "An exporter", "A per-row column", "An engine", "An id system", "An option of capture", "A loss-mask rule", "A record field",
    "A report figure", "A published weight form", "An adapter for a residual stream",
]  # fmt: skip
FILE = re.compile(r"`([\w./-]+\.(?:py|md|toml|yml))`")
# A file, and in parentheses that may go on with words the names to look for in it.
NAMES = re.compile(r"`([\w/]+\.py)`(?:\*\*)?\s+\(([^)]*)\)")
TO_ADD = {"capture/formats/NAME.py", "docs/howto/NAME.md"}


def sections(level: int) -> dict[str, str]:
    """Heading to text, of the headings of one level."""
    parts = re.split(rf"^{'#' * level} (.+)$", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def bound_names(path: str) -> set[str]:
    """Every function, class, method and assigned name of a file."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_the_three_walks_and_the_ten_kinds_of_change_are_there() -> None:
    assert [heading for heading in sections(2) if heading.startswith("Walk")] == WALKS
    assert list(sections(3)) == CHANGES


def test_every_file_of_the_page_exists() -> None:
    files = set(FILE.findall(PAGE)) - TO_ADD
    assert len(files) > 100
    assert sorted(name for name in files if not (ROOT / name).is_file()) == []


def test_every_name_of_the_page_is_in_its_file() -> None:
    told = [(path, name) for path, names in NAMES.findall(PAGE) for name in re.findall(r"`(\w+)(?:\.\w+)?`", names)]
    assert len(told) > 80
    missing = [(path, name) for path, name in told if path not in TO_ADD and name not in bound_names(path)]
    assert missing == []


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_is_a_numbered_list_of_files(heading: str) -> None:
    steps = re.findall(r"^\d+\. (.*)$", sections(2)[heading], re.MULTILINE)
    assert len(steps) >= 8
    assert [step for step in steps if not FILE.search(step)] == []


@pytest.mark.parametrize("heading", CHANGES)
def test_a_kind_of_change_names_a_source_a_test_and_its_documents(heading: str) -> None:
    text = sections(3)[heading]
    files = FILE.findall(text)
    assert [file for file in files if file.startswith(("capture/", "hooks/", "models/"))]
    assert [file for file in files if file.startswith("tests/")]
    assert "- Documents: " in text
