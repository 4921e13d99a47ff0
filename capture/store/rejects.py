"""One input row that was not captured, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reject:
    """An input row that ends without rows in a shard.

    source, line: where the row stands; line counts from 1.
    id: the row's own id, None where it could not be read.
    detail: any JSON values that say more (layer id, first token, count).
    sample_index: the sample's place in the plan; None where it never reached the plan.
    """

    source: str
    line: int
    id: str | None
    reason: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    sample_index: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The record as one JSON object; absent values are left out."""
        record: dict[str, Any] = {"source": self.source, "line": self.line, "id": self.id, "reason": self.reason}
        if self.detail:
            record["detail"] = dict(self.detail)
        if self.sample_index is not None:
            record["sample_index"] = self.sample_index
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Reject":
        """The inverse of `as_json`; KeyError where a field is missing."""
        return cls(
            record["source"],
            record["line"],
            record["id"],
            record["reason"],
            record.get("detail", {}),
            record.get("sample_index"),
        )
