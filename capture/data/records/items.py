"""An input record, and what becomes of it: a sample or a reject."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...rejects import Reject
from .fields import NO_FIELDS, FieldUse


@dataclass(frozen=True, slots=True)
class RawRecord:
    """`payload` is the row's JSON text as bytes, or the values of a table's row; `line` is 1-based."""

    source: str
    line: int
    payload: bytes | Mapping[str, Any]


Rows = tuple[int, int]


@dataclass(frozen=True)
class ImageFile:
    """A local file and the SHA-256 of its bytes in hex."""

    path: str
    sha256: str


@dataclass(frozen=True)
class SampleImages:
    """What makes the model's inputs of one sample with images.

    `text`: the rendering, cut behind the last image that truncation left. `files`: those images in order.
    `placeholders`: first row and one past the last, of each run of rows that hold image features; where the model expands
    placeholders itself (`model_expands`), one run an image.
    """

    text: str
    files: tuple[ImageFile, ...]
    placeholders: tuple[Rows, ...]
    model_expands: bool

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "text": self.text,
            "files": [[file.path, file.sha256] for file in self.files],
            "placeholders": [list(rows) for rows in self.placeholders],
            "model_expands": self.model_expands,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SampleImages":
        """Return the inverse of `as_json`."""
        return cls(
            values["text"],
            tuple(ImageFile(path, sha256) for path, sha256 in values["files"]),
            tuple((start, stop) for start, stop in values["placeholders"]),
            values["model_expands"],
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """One input row after tokenisation.

    `input_ids`: (S,) int32. `loss_mask`: (S,) uint8 of 0 and 1; `loss_mask[t]` speaks of `input_ids[t]`, unshifted.
    `line` is 1-based: the line of a `.jsonl` file, the place in a list or table elsewhere.
    `mask_rule` is one of `generation_marks`, `substitution`, `all`, `completion`, `text_turns`, `row`, `kimi_tokens`, or
    the names of the record's own masks.
    `warnings` holds short sorted codes, each at most once. `truncated_from` is the length before truncation, or None.
    `images`: of a sample with images, whose `input_ids` are the expanded ones: one for each hidden row.
    `fields`: which fields of the record were read.
    Raises ValueError where ids and mask differ in dtype or shape from the above, or there is no token.
    """

    sample_id: str
    source: str
    line: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    mask_rule: str
    warnings: tuple[str, ...] = ()
    truncated_from: int | None = None
    images: SampleImages | None = None
    fields: FieldUse = NO_FIELDS

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.loss_mask
        if ids.dtype != np.int32 or mask.dtype != np.uint8 or ids.ndim != 1 or ids.shape != mask.shape or not ids.size:
            raise ValueError(
                f"expected input_ids (S,) int32 and loss_mask (S,) uint8 with S >= 1; found {ids.shape} {ids.dtype} "
                f"and {mask.shape} {mask.dtype} at {self.source}:{self.line}"
            )

    @property
    def supervised(self) -> int:
        """Return how many tokens the loss mask marks."""
        return int(self.loss_mask.sum())


Item = Sample | Reject
