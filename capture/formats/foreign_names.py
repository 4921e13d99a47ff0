"""Names for the numbered samples of a foreign data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ...models.checked_record import of_type
from .captured import Who
from .destination import SAMPLES_FILE
from .errors import LayoutError


def sample_names(folder: Path, start: int) -> Iterator[Who]:
    """Yield the names of the samples from `start` on: from our export's list, or else the number, or folder and number."""
    path = folder / SAMPLES_FILE
    if not path.is_file():
        yield from _numbered(folder, start)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number >= start:
                yield _named(path, number, line)


def _numbered(folder: Path, start: int) -> Iterator[Who]:
    number = start
    while True:
        yield Who(f"{number:08d}", folder.name, number + 1)
        number += 1


def _named(path: Path, number: int, line: bytes) -> Who:
    try:
        record = json.loads(line)
        if record["number"] != number:
            raise ValueError(f"number {record['number']}")
        return Who(of_type(str, record["id"]), of_type(str, record["source"]), of_type(int, record["line"]))
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(
            f"{path}, line {number + 1}: expected the name of sample {number}, found {error!r}."
        ) from error
