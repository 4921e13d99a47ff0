"""Small plain tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Name and value, one pair a line, values under each other."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def size(count: int) -> str:
    """A number of bytes in decimal units: ``45.2 MB``."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
