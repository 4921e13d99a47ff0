"""One input record that was not captured, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..models.checked_record import of_type


@dataclass(frozen=True)
class Reject:
    """An input record that ends without rows in a shard.

    source, line: where the record is; line counts from 1.
    sample_id: the record's own id, None where it could not be read.
    reason: a sentence for people.
    detail: any JSON values that say more (layer id, first token, count); `code` in it is a short stable word for counting.
    sample_index: the sample's place in the plan; None where it never reached the plan.

    Example:
        >>> Reject.of("rows.jsonl", 3, None, "expected one JSON object; found text", "bad_json").code
        'bad_json'
    """

    source: str
    line: int
    sample_id: str | None
    reason: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    sample_index: int | None = None

    @classmethod
    def of(cls, source: str, line: int, sample_id: str | None, reason: str, code: str) -> "Reject":
        """Return the reject of a record that became no sample."""
        return cls(source, line, sample_id, reason, {"code": code})

    @property
    def code(self) -> str:
        """The short word that rejects are counted by; `other` where none was given."""
        return str(self.detail.get("code") or "other")

    def as_json(self) -> dict[str, Any]:
        """Return the reject as one JSON object; absent values are left out."""
        record: dict[str, Any] = {"source": self.source, "line": self.line, "id": self.sample_id, "reason": self.reason}
        if self.detail:
            record["detail"] = dict(self.detail)
        if self.sample_index is not None:
            record["sample_index"] = self.sample_index
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Reject":
        """Return the inverse of `as_json`; KeyError where a field is missing, TypeError where it is of another kind."""
        sample_id, place = record["id"], record.get("sample_index")
        return cls(
            of_type(str, record["source"]),
            of_type(int, record["line"]),
            None if sample_id is None else of_type(str, sample_id),
            of_type(str, record["reason"]),
            of_type(dict, record.get("detail", {})),
            None if place is None else of_type(int, place),
        )
