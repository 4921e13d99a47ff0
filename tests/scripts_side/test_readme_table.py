"""README's table of families is what docs/architectures.md says."""

import re
from pathlib import Path

import pytest
import readme_table
from readme_table import CLOSING, FAMILIES, OPENING, support_table, with_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = """- Layers found: **5** of 7. Exact without an adapter: **3**. Wrong: **0**.

| model type | class | layers | n | layer returns | norm | result |
| --- | --- | --- | --- | --- | --- | --- |
| aa | AaForCausalLM | `model.layers` | 4 | tensor | `model.norm` | exact |
| bb | BbForCausalLM | `model.layers` | 4 | tensor | `model.norm` | exact: read by next_input, chosen by structure |
| cc | CcForCausalLM | `h` | 4 | tensor | none | exact through an adapter: x.mean, x.all; without one, 0 is. why. so |
| dd | DdForCausalLM |  |  | tensor |  | refused: cannot tell which: found two |
"""


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def page() -> str:
    return (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")


def test_readme_and_the_sweeps_page_agree() -> None:
    assert with_table(readme(), support_table(page())) == readme(), "run python scripts/readme_table.py"


def test_the_counts_are_those_of_the_pages_rows() -> None:
    causal = page().partition("## Causal language models")[2].partition("## Image-text models")[0]
    results = re.findall(
        r"^\| \S+ \|.*\| (exact where it runs|exact through|exact|refused|not built|wrong)[^|]*\|$", causal, re.M
    )
    exact = sum(result in ("exact", "exact where it runs") for result in results)
    assert f"Of the {len(results)} model types" in readme()
    assert f"{exact} are exact without an adapter" in readme()
    wrong = re.findall(r"^\| \S+ \|.*\| wrong: [^|]*\|$", page(), re.M)
    assert f"{len(wrong)} are wrong, image-text models included" in readme()


def test_families_with_one_place_and_result_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_table, "FAMILIES", {"A": "aa", "D": "dd", "C": "cc", "B": "bb"})
    assert support_table(PAGE).splitlines()[3:] == [
        "| families | decoder layers | result |",
        "|---|---|---|",
        "| A, B | `model.layers` | exact |",
        "| D | none | refused |",
        "| C | `h` | exact by adapter `x.mean` or `x.all` |",
    ]
    assert "of 5 are found and 3 are exact" in support_table(PAGE)


def test_a_family_that_the_sweep_has_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_table, "FAMILIES", {"A": "aa", "Z": "zz"})
    with pytest.raises(ValueError, match="missing: zz"):
        support_table(PAGE)
    with pytest.raises(ValueError, match="missing: counts"):
        support_table(PAGE.replace("Wrong", "Odd").replace("| bb |", "| zz |"))


@pytest.mark.parametrize("text", ["no markers", f"{CLOSING}{OPENING}", f"{OPENING}{CLOSING}{CLOSING}"])
def test_a_readme_without_its_markers_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        with_table(text, "table")


def test_the_table_names_kimi_and_keeps_what_is_around_it() -> None:
    assert {"kimi_linear", "kimi_k25"} <= set(FAMILIES.values())
    assert with_table(f"a\n{OPENING}\nold\n{CLOSING}\nb", "new") == f"a\n{OPENING}\nnew\n{CLOSING}\nb"
