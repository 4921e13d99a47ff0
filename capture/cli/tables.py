"""Small plain tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Name and value, one pair a line, values under each other."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def size(count: int) -> str:
    """A number of bytes in decimal units: ``45.2 MB``."""
    if count < 1000:
        return f"{count} bytes"
    power = min((len(str(count)) - 1) // 3, len(_UNITS))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"
