"""What was measured: figures with their median and spread, as a Markdown table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEADINGS = ("section", "what", "data", "median", "lowest to highest", "unit", "times")

# By round; a contender need not run in every one.
ByRound = Mapping[int, float]


@dataclass(frozen=True)
class Figure:
    """One line of the table: the values of one measurement, in the order they were taken."""

    section: str
    what: str
    data: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def cells(self) -> tuple[str, ...]:
        spread = f"{shown(min(self.values), self.unit)} to {shown(max(self.values), self.unit)}"
        once = len(self.values) == 1
        return (
            self.section,
            self.what,
            self.data,
            shown(self.median, self.unit),
            "" if once else spread,
            self.unit,
            str(len(self.values)),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "what": self.what,
            "data": self.data,
            "unit": self.unit,
            "median": self.median,
            "values": list(self.values),
        }


def ratios(section: str, what: str, data: str, above: ByRound, below: ByRound) -> list[Figure]:
    """`above` / `below` of every round that has both: pairs, so that a slow minute of the machine touches both alike."""
    values = tuple(above[i] / below[i] for i in sorted(above.keys() & below.keys()))
    return [Figure(section, what, data, "x", values)] if values else []


def in_order(by_round: ByRound) -> tuple[float, ...]:
    return tuple(by_round[i] for i in sorted(by_round))


def shown(value: float, unit: str) -> str:
    if unit in ("tokens/s", "MB/s", "positions"):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if unit in ("MB", "s", "%") else f"{value:,.3f}"


def markdown(figures: Iterable[Figure]) -> str:
    """One table of all figures."""
    rows: Sequence[Sequence[str]] = [HEADINGS, ["---"] * len(HEADINGS), *(figure.cells() for figure in figures)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
