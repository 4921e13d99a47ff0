"""What came of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunSummary:
    """Counts of a finished run; `captured` and `rejected` add up to the input rows.

    Attributes:
        captured: samples on disk.
        rejected: rows that are in rejects.jsonl instead.
        rejected_by_code: why, counted by a short word.
        tokens: rows of the shards.
        supervised_tokens: those of them that their loss masks mark.
        truncated: samples that were cut to the longest length.
        warnings: what the template did not render and the like, counted by a short word.
        shards: how many there are.
        shards_done_before: how many of them an earlier run had sealed.
        bytes: size of the shards.
        tokens_now: what this run captured.
        seconds: from its first forward to its last seal.
        batch_tokens: the budget of positions that a forward got at the end; None where there was none, or not one.
        notes: what the model's checkpoint and config disagree on.
    """

    out: Path
    captured: int
    rejected: int
    rejected_by_code: dict[str, int]
    tokens: int
    supervised_tokens: int
    truncated: int
    warnings: dict[str, int]
    shards: int
    shards_done_before: int
    bytes: int
    tokens_now: int
    seconds: float
    batch_tokens: int | None
    layer_ids: tuple[int, ...]
    convention: str
    hidden_size: int
    notes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_now / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, for another process."""
        return asdict(self) | {"out": str(self.out)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunSummary:
        """The inverse of `as_json`."""
        tuples = {name: tuple(value[name]) for name in ("layer_ids", "notes")}
        return cls(**value | tuples | {"out": Path(value["out"])})

    def counts(self) -> dict[str, Any]:
        """What the manifest keeps of it."""
        return {
            "captured": self.captured,
            "rejected": self.rejected,
            "rejected_by_code": self.rejected_by_code,
            "supervised_tokens": self.supervised_tokens,
            "truncated": self.truncated,
            "warnings": self.warnings,
        }
