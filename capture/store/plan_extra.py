"""Counts and hashes that a plan keeps of the records it was made from."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...models.checked_fields import CheckedFields


@dataclass(frozen=True)
class PlanExtra(CheckedFields):
    """Values of all samples of a run together: for its summary, the headers of its shards, and a later run.

    Attributes:
        warnings, unread_fields, mask_rules: numbers of samples by code, field and rule.
        first_warning: `source:line` of the first sample with each warning.
        truncated: samples that were cut to the longest length.
        supervised_tokens: tokens that the loss masks mark.
        template_date: the date that chat templates read, as YYYY-MM-DD; "" where none was recorded.
        notes: sentences about the tokenizer.
        weights_crc32: checksum of each weight file of the model; None in a plan of an earlier release.
        images, image_processor_sha256: number of image files, and hash of what processes them; None without images.
    """

    warnings: Mapping[str, int] = field(default_factory=dict)
    first_warning: Mapping[str, str] = field(default_factory=dict)
    unread_fields: Mapping[str, int] = field(default_factory=dict)
    mask_rules: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    supervised_tokens: int = 0
    template_date: str = ""
    notes: tuple[str, ...] = ()
    weights_crc32: Mapping[str, str] | None = None
    images: int | None = None
    image_processor_sha256: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template_date:
            datetime.date.fromisoformat(self.template_date)

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object; values that are None, and a date that was not recorded, are left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PlanExtra:
        """Return the inverse of `as_json`; raises TypeError or ValueError for an unknown entry or a value of another type."""
        return cls(**record)
