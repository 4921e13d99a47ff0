"""Disk space that a run needs, and whether it is free."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ...models.errors import RunError
from ..store import Column


class NotEnoughSpaceError(RunError):
    """The disk has less room than the run will fill."""


def bytes_of_rows(columns: Sequence[Column], rows: int) -> int:
    """Return the bytes of `rows` rows of `columns`, without headers and sample tables (a few hundred bytes a sample)."""
    return rows * sum(column.row_bytes for column in columns)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` is, or will be, on."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(folder: Path, needed: int, *, force: bool) -> None:
    """Raise NotEnoughSpaceError where `needed` bytes do not fit, unless `force`."""
    free = free_bytes(folder)
    if needed > free and not force:
        raise NotEnoughSpaceError(
            f"{folder} will need {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; make room, choose another "
            "folder, or start anyway with --force."
        )
