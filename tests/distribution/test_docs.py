"""The documentation lists every page, every public name and every command; `scripts/docs.sh` builds it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import hiddentap
from hiddentap.capture.cli.main import hiddentap as command

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GIVEN_BY_TAP = ("hooks.tap.ActiveTap", "hooks.tap.Captured")


def pages_of(nav: list[Any]) -> Iterator[str]:
    """The files of a navigation, however deep."""
    for entry in nav:
        for value in [entry] if isinstance(entry, str) else entry.values():
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        targets = re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text(encoding="utf-8"))
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_the_reference_has_every_public_name_once() -> None:
    text = (DOCS / "reference/python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: hiddentap\.([\w.]+)$", text, re.MULTILINE)
    # Where a module has the name of what it holds, the page has to say which is meant.
    names = [name.rpartition(".")[2] for name in listed if name not in GIVEN_BY_TAP]
    assert sorted(names) == sorted(hiddentap.__all__)


def test_every_command_that_gives_json_has_its_keys_documented() -> None:
    text = (DOCS / "reference/json.md").read_text(encoding="utf-8")
    giving = {
        name for name, one in command.commands.items() if any("--json" in parameter.opts for parameter in one.params)
    }
    assert giving == set(command.commands)
    assert giving - set(re.findall(r"^## `(\w+)`$", text, re.MULTILINE)) == set()
