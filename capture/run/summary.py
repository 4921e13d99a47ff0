"""The summary of a run."""

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
        rejected_by_code: rejected rows, counted by a short word for the reason.
        tokens: rows of the shards.
        supervised_tokens: those of them that their loss masks mark.
        truncated: samples that were cut to the longest length.
        warnings: warnings, such as of fields that the template did not render, counted by a short word.
        first_reject, first_warning: where the first row of each code is; of a reject, with its reason.
        unread_fields: fields of the rows that nothing read, counted by name.
        shards: how many there are.
        shards_done_before: how many of them an earlier run had sealed.
        bytes: size of the shards.
        tokens_now: tokens that this run captured.
        seconds: from its first forward to its last seal.
        batch_tokens: positions per forward at the end; None where there was no budget, or not one.
        notes: what the model's checkpoint and config disagree on.
        top_logits_share: mean probability that the stored top logits of a row hold together, None where none are stored.
        top_logits_quantiles: the 0.05, 0.5 and 0.95 quantiles of this probability over the rows, by level.

    Example:
        >>> summary = capture_dataset(CaptureSettings("MODEL", "chats.jsonl", "OUT2", layer_ids=[1, 2]))
        >>> summary.captured, summary.rejected, summary.layer_ids, summary.hidden_size
        (5, 0, (1, 2), 32)
    """

    out: Path
    captured: int
    rejected: int
    rejected_by_code: dict[str, int]
    tokens: int
    supervised_tokens: int
    truncated: int
    first_reject: dict[str, str]
    warnings: dict[str, int]
    first_warning: dict[str, str]
    unread_fields: dict[str, int]
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
    top_logits_share: float | None = None
    top_logits_quantiles: dict[str, float] | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_now / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON, for another process."""
        return asdict(self) | {"out": str(self.out)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunSummary:
        """Return the summary that `as_json` wrote."""
        tuples = {name: tuple(value[name]) for name in ("layer_ids", "notes")}
        return cls(**value | tuples | {"out": Path(value["out"])})

    def counts(self) -> dict[str, Any]:
        """Return the counts that the manifest keeps."""
        return {
            "captured": self.captured,
            "rejected": self.rejected,
            "rejected_by_code": self.rejected_by_code,
            "supervised_tokens": self.supervised_tokens,
            "truncated": self.truncated,
            "warnings": self.warnings,
            "first_warning": self.first_warning,
            "unread_fields": self.unread_fields,
            **self._top_logits(),
        }

    def _top_logits(self) -> dict[str, Any]:
        if self.top_logits_share is None:
            return {}
        return {"top_logits_share": self.top_logits_share, "top_logits_quantiles": self.top_logits_quantiles}
