"""Packs without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hiddentap.capture.reading import PackLoader


def endless(packs: PackLoader, rows: Callable[[dict[str, Any]], Tensor]) -> Iterator[dict[str, Any]]:
    """Epoch after epoch, the packs in which `rows` finds any."""
    while True:
        yield from (pack for pack in packs if len(rows(pack)))
