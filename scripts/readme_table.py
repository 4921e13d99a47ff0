#!/usr/bin/env python
"""Write README's table of supported families from docs/architectures.md, the page of the sweep.

python scripts/readme_table.py     # after scripts/sweep_architectures.py --write, which calls it too
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "docs" / "architectures.md", ROOT / "README.md"
OPENING, CLOSING = "<!-- written by scripts/readme_table.py -->", "<!-- end of the table -->"

# The name that people know a family by, and its model type in the sweep.
FAMILIES = {
    "Llama": "llama", "Llama 4": "llama4_text", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen2": "qwen2",
    "Qwen3": "qwen3", "Qwen3 MoE": "qwen3_moe", "Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3_5", "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text", "Phi-3": "phi3", "OLMo 2": "olmo2", "SmolLM3": "smollm3", "Granite": "granite",
    "GLM-4": "glm4", "GLM-4 MoE": "glm4_moe", "DeepSeek V2": "deepseek_v2", "DeepSeek V3, Kimi K2": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32", "Kimi Linear": "kimi_linear", "gpt-oss": "gpt_oss", "MiniMax M2": "minimax_m2",
    "Nemotron-H": "nemotron_h", "Jamba": "jamba", "LFM2": "lfm2", "Kimi K2.5": "kimi_k25", "Gemma 4": "gemma4",
    "Mistral 3": "mistral3", "Qwen3-VL": "qwen3_vl", "GPT-2": "gpt2", "Falcon": "falcon", "BLOOM": "bloom",
    "GPT-NeoX": "gpt_neox", "OPT": "opt", "Mamba": "mamba", "Mamba 2": "mamba2", "DeepSeek V4": "deepseek_v4",
    "Gemma 3n": "gemma3n_text", "RWKV": "rwkv", "XLNet": "xlnet", "BLT": "blt",
}  # fmt: skip

_COUNTS = re.compile(
    r"Layers found: \*\*(\d+)\*\* of (\d+)\. Exact without an adapter: \*\*(\d+)\*\*\. Wrong: \*\*(\d+)\*\*"
)


def support_table(page: str) -> str:
    """The text between README's two markers, from the text of docs/architectures.md.

    Raises ValueError where the page lacks its counts or one of the families.
    """
    counts = _COUNTS.search(page)
    rows = _rows(page)
    missing = [kind for kind in FAMILIES.values() if kind not in rows]
    if counts is None or missing:
        raise ValueError(
            f"expected counts and rows of all families in {PAGE}; missing: {', '.join(missing) or 'counts'}"
        )
    found, types, exact, wrong = counts.groups()
    groups: dict[tuple[str, str], list[str]] = {}
    for family, kind in FAMILIES.items():
        groups.setdefault(rows[kind], []).append(family)
    lines = [
        f"Of the {types} model types that transformers maps to a causal LM, the layers of {found} are found and {exact} are exact"
        " without an adapter:",
        f"every boundary of a layer that runs has the model's bits. {wrong} are wrong, image-text models included; what"
        " cannot be proved is refused.",
        "",
        "| families | decoder layers | result |",
        "|---|---|---|",
        *(f"| {', '.join(families)} | {layers} | {result} |" for (layers, result), families in groups.items()),
    ]
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """README's text with `table` between its markers; raises ValueError where they are not there once each, in order."""
    before, opening, rest = readme.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not opening or not closing or OPENING in rest or CLOSING in after:
        raise ValueError(f"expected {OPENING} and {CLOSING} once each in README.md, in this order.")
    return f"{before}{OPENING}\n{table}\n{CLOSING}{after}"


def write_readme() -> None:
    """Bring README's table to what docs/architectures.md says."""
    table = support_table(PAGE.read_text(encoding="utf-8"))
    README.write_text(with_table(README.read_text(encoding="utf-8"), table), encoding="utf-8")


def _rows(page: str) -> dict[str, tuple[str, str]]:
    """Model type to where its layers are and what came of it."""
    found: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")]
        if cells[0] == "model type":
            names = cells
        elif line.startswith("| ") and "result" in names and len(cells) == len(names):
            row = dict(zip(names, cells, strict=True))
            found[row["model type"]] = (row["layers"] or "none", _result(row["result"]))
    return found


def _result(text: str) -> str:
    word, _, detail = text.partition(": ")
    if word == "exact through an adapter":
        names = detail.partition(". ")[0].partition(";")[0]
        return f"exact by adapter {' or '.join(f'`{name}`' for name in names.split(', '))}"
    return word


if __name__ == "__main__":
    write_readme()
