"""One input row as it stands in its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RawRow:
    """`payload` is the row's JSON text as bytes, or the values of a table's row; `line` is 1-based."""

    source: str
    line: int
    payload: bytes | Mapping[str, Any]
