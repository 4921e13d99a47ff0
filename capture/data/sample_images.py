"""The images of one sample, as a plan keeps them: which files, and which rows are theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        """The fields as JSON values."""
        return {
            "text": self.text,
            "files": [[file.path, file.sha256] for file in self.files],
            "placeholders": [list(rows) for rows in self.placeholders],
            "model_expands": self.model_expands,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SampleImages":
        """The inverse of `as_json`."""
        return cls(
            values["text"],
            tuple(ImageFile(path, sha256) for path, sha256 in values["files"]),
            tuple((start, stop) for start, stop in values["placeholders"]),
            values["model_expands"],
        )
