"""Findings in words: one line a kind, however many there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..store import Finding

_SHOWN = 3
# Counts, positions, sizes and checksums: where a fault is. Which layer or slot it is about is another matter.
_NUMBERS = re.compile(r"(?<!layer )(?<!boundary )(?<!slot )(?<!not )\b(?:[0-9a-f]{64}|[0-9a-f]{8}|\d[\d,.]*)\b")


def fault_lines(folder: Path, findings: Iterable[Finding]) -> Iterator[str]:
    """Yield one line a kind of finding: the first of it in full, how many more there are, and where.

    Findings are of one kind where they differ only in file, sample, counts and positions.

    Args:
        folder: files below it are named by their path from it.
    """
    kinds: dict[tuple[str, str | None, str], list[Finding]] = {}
    for finding in findings:
        kinds.setdefault((finding.severity, finding.tensor, _kind(finding)), []).append(finding)
    for (severity, _, _), group in kinds.items():
        yield f"{severity}: {_same(folder, group) or _alike(folder, group)}"


def _same(folder: Path, group: Sequence[Finding]) -> str | None:
    """Findings that differ in nothing but their file; None where they differ in more."""
    told = {_where(finding) + finding.what for finding in group}
    if len(told) > 1:
        return None
    files = list(dict.fromkeys(_name(folder, finding.path) for finding in group))
    more = f" and {len(files) - _SHOWN:,} more files" if len(files) > _SHOWN else ""
    return f"{', '.join(files[:_SHOWN])}{more}: {told.pop()}"


def _alike(folder: Path, group: Sequence[Finding]) -> str:
    first, *rest = group
    files = len({finding.path for finding in group})
    places = list(dict.fromkeys(_place(folder, finding) for finding in rest))
    shown = ", ".join(places[:_SHOWN]) + (", ..." if len(places) > _SHOWN else "")
    among = "" if files == 1 else f" in {files:,} files"
    return f"{_name(folder, first.path)}: {_where(first)}{first.what} ({len(rest):,} more like this{among}: {shown})"


def _place(folder: Path, finding: Finding) -> str:
    file = _name(folder, finding.path)
    return file if finding.sample_id is None else f"sample {finding.sample_id!r} of {file}"


def _name(folder: Path, path: str) -> str:
    found = Path(path)
    return str(found.relative_to(folder)) if found.is_relative_to(folder) and found != folder else path


def _kind(finding: Finding) -> str:
    """Return the kind of a fault: its text without file name, details and the numbers that say where."""
    what = finding.what.replace(finding.path, "").removeprefix(": ")
    return _NUMBERS.sub("#", re.split(r"[:;] ", what, maxsplit=1)[0])


def _where(finding: Finding) -> str:
    parts = [f"sample {finding.sample_id!r}"] if finding.sample_id is not None else []
    parts += [finding.tensor] if finding.tensor is not None else []
    return f"{', '.join(parts)}: " if parts else ""
