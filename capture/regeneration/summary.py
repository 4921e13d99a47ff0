"""The summary of a regeneration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..run import RunSummary


@dataclass(frozen=True)
class RegenerationSummary:
    """Counts of a finished regeneration.

    Attributes:
        capture: of the capture over the finished samples; its rejects are all of the run's.
        finish_reasons: why turns ended, counted.
        turns: that were written anew. turns_kept: that stayed as they were, because a tool's result follows or nothing precedes.
            turns_left_out: that were not asked for because the conversation had become too long for the model.
        new_tokens: that the model wrote. supervised_tokens: those of them that the loss masks mark.
        end_tokens: ids of the tokens that end an answer, by who names them.
        pieces, pieces_done_before: of the answers, and how many of them an earlier run had sealed.
        new_tokens_now, seconds: tokens that this run generated, and how long it took.
        messages: the file of the new conversations.
    """

    out: Path
    capture: RunSummary
    finish_reasons: dict[str, int]
    turns: int
    turns_kept: int
    turns_left_out: int
    new_tokens: int
    supervised_tokens: int
    end_tokens: dict[str, list[int]]
    pieces: int
    pieces_done_before: int
    new_tokens_now: int
    seconds: float
    messages: Path

    @property
    def captured(self) -> int:
        return self.capture.captured

    @property
    def rejected(self) -> int:
        return self.capture.rejected


def answer_counts(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts of a summary over the lines of all pieces."""
    reasons, sums = Counter[str](), Counter[str]()
    for line in lines:
        turns = line.get("turns", ())
        reasons.update(turn["finish_reason"] for turn in turns)
        sums["turns"] += len(turns)
        sums["new_tokens"] += sum(turn["tokens"] for turn in turns)
        sums["supervised_tokens"] += sum(turn["supervised"] for turn in turns)
        sums["turns_kept"] += line.get("kept", 0)
        sums["turns_left_out"] += line.get("left_out", 0)
    names = ("turns", "turns_kept", "turns_left_out", "new_tokens", "supervised_tokens")
    return {"finish_reasons": dict(reasons), **{name: sums[name] for name in names}}
