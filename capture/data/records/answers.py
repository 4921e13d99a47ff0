"""Samples that a regeneration finished: lines of the pieces in its folder of answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...rejects import Reject
from ..errors import SourceError
from .fields import FieldUse
from .items import Item, Sample

PIECES = "answers-*.jsonl"
RULE = "generated"


def answered_items(folder: Path) -> Iterator[Item]:
    """Yield one item per input row, in input order: the finished sample, or why there is none.

    Raises:
        SourceError: a piece that cannot be read.
    """
    for path in sorted(folder.glob(PIECES)):
        try:
            for text in path.read_bytes().split(b"\n"):
                if text:
                    yield _item(json.loads(text))
        except (OSError, ValueError, KeyError) as error:
            raise SourceError(
                f"expected the answers of a regeneration in {path}; found that it cannot be read ({error})"
            ) from error


def _item(line: dict[str, Any]) -> Item:
    if "rejected" in line:
        return Reject.from_json(line["rejected"])
    ids, mask = np.asarray(line["input_ids"], np.int32), np.asarray(line["loss_mask"], np.uint8)
    use = FieldUse(unread=tuple(map(str, line.get("unread", ()))))
    return Sample(line["id"], line["source"], line["line"], ids, mask, RULE, fields=use)
