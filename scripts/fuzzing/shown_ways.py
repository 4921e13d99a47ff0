"""The ways of running that docs/architectures.md shows for each model type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from .draws import Draw
from .families import Family
from .verdicts import CACHED_BOUND, FLOAT32_BOUND, MOST_ROUNDING, ROUNDINGS, Verdict, judge, reason
from .ways import WAYS

LENGTHS = (9, 14, 6)
SHOWN = {
    "alone": WAYS["tap alone"],
    "padded right": WAYS["tap right lengths"],
    "padded left": WAYS["tap left mask"],
    "cached steps": WAYS["tap alone dynamic cache"],
    "static cache": WAYS["tap alone static cache"],
}


def _short(bound: float) -> str:
    """A power of ten as `1e-5`."""
    return f"{bound:.0e}".replace("e-0", "e-")


WORDS = [
    f"Each model above that needs no adapter runs three samples ({', '.join(map(str, LENGTHS))} tokens, float32) through `tap`, "
    "at its last two layers, in five ways. The rows are compared with those of plain forwards of single samples.",
    "",
    "- *alone*: one sample per forward. *padded right*: one batch, padding given by `lengths`. *padded left*: one batch, "
    "padding given by an attention mask.",
    "- *cached steps*: each sample alone, in several calls with the model's own KV cache. *static cache*: the same with a "
    "`StaticCache`.",
    f"- *equal*: *alone*, bit for bit; padded, each row within {_short(FLOAT32_BOUND)} of its norm; with a cache, within "
    f"{_short(CACHED_BOUND)}. A difference above this bound and below {_short(MOST_ROUNDING)} also counts as equal if "
    f"it is at most {ROUNDINGS:.0f} times the effect of rounding every weight.",
    "- *refused*: hiddentap raises an error that gives the reason. *cannot run*: the model itself raises an error.",
    "",
    "Models that are equal in all five ways are not listed.",
]  # fmt: skip


def run_in_shown_ways(model_type: str, path: str, layer_ids: Sequence[int], *, ordinary: bool) -> dict[str, Verdict]:
    """What comes of three samples in each way.

    path, layer_ids: where the layers are, and which of them can be tapped.
    ordinary: whether a plain sample that runs alone must not be refused.
    """
    asked = Draw(
        seed=0, number=0, family=Family(model_type, path, ordinary=ordinary), fields={}, weights=0, attention="default",
        dtype=torch.float32, mode="eval", way=SHOWN["alone"], wrapper="none", lengths=LENGTHS,
        layer_ids=tuple(layer_ids[-2:]), cut=0.3,
    )  # fmt: skip
    return {name: judge(asked.in_way(way)) for name, way in SHOWN.items()}


def counts_by_way(runs: Iterable[Mapping[str, Verdict]]) -> list[str]:
    """One line for each way: how many models came to which verdict."""
    given = [run for run in runs if run]
    counted = {name: Counter(run[name].kind for run in given).most_common() for name in SHOWN}
    return [
        f"{name}: {', '.join(f'{kind} {count}' for kind, count in kinds)}" for name, kinds in counted.items() if kinds
    ]


def ways_table(runs: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    """The page's part on ways of running; `runs` by model type."""
    lines = ["## Ways of running", "", *WORDS, "", *(f"- {line}." for line in counts_by_way(runs.values())), ""]
    lines += ["| model type | " + " | ".join(SHOWN) + " | refused because |", "|" + " --- |" * (len(SHOWN) + 2)]
    for model_type, verdicts in sorted(runs.items()):
        if any(verdict.kind != "equal" for verdict in verdicts.values()):
            why = dict.fromkeys(reason(v.detail) for v in verdicts.values() if v.kind == "refused")
            cells = [model_type, *(verdicts[name].kind for name in SHOWN), "; ".join(why).replace("|", "/")]
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]
