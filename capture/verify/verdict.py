"""Verdicts on one tap of one sample, merged into findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..store import Finding
from ..store.checks import Severity, Witness
from .chosen import SampleName
from .declared import DeclaredTap
from .matching import Match


@dataclass(frozen=True)
class Verdict:
    """One tap of one sample is not what it should be.

    what: the same words for every sample with the same fault. detail: numbers of this sample.
    of_head: whether the stored head is at fault, and not the rows.
    """

    sample: SampleName
    tap: DeclaredTap
    what: str
    detail: str = ""
    severity: Severity = "error"
    of_head: bool = False


def mismatch(tap: DeclaredTap, match: Match) -> str:
    """Return which state the rows of `tap` are, in the words of its declaration."""
    right_state = match.state == tap.state
    if right_state:
        return f"{_shifted(match.shift)}: {_rows_of(tap.label, match.shift)}"
    if not match.shift and tap.slot is None and match.state.boundary == tap.state.boundary:
        names = ("post-norm", "pre-norm") if match.state.normed else ("pre-norm", "post-norm")
        return f"{names[0]} stored as {names[1]}"
    expected = str(tap.state) if match.state.normed or tap.state.normed else str(tap.state.boundary)
    what = f"stored {tap.label} matches {match.state}, not {expected} as declared"
    return f"{what}, and {_shifted(match.shift)}: {_rows_of(tap.label, match.shift)}" if match.shift else what


def merged(verdicts: Iterable[Verdict]) -> list[Finding]:
    """Return one finding per shard, tensor and fault; it names the sample where it is one."""
    groups: dict[tuple[str, str, str, Severity, Witness], list[Verdict]] = {}
    for verdict in verdicts:
        witness: Witness = "head" if verdict.of_head else "model"
        key = (str(verdict.sample.path), verdict.tap.column, verdict.what, verdict.severity, witness)
        groups.setdefault(key, []).append(verdict)
    return [
        Finding(
            path,
            group[0].sample.sample_id if _samples(group) == 1 else None,
            tensor,
            _sentence(what, group),
            severity,
            witness,
        )
        for (path, tensor, what, severity, witness), group in groups.items()
    ]


def _sentence(what: str, group: list[Verdict]) -> str:
    first = group[0]
    if _samples(group) == 1:
        return what + (f": {first.detail}" if first.detail else "")
    shown = f"{what} in {_samples(group)} compared samples"
    return shown + (f"; in {first.sample.sample_id!r} {first.detail}" if first.detail else "")


def _samples(group: list[Verdict]) -> int:
    return len({verdict.sample for verdict in group})


def _shifted(shift: int) -> str:
    return f"rows shifted by {'one' if abs(shift) == 1 else abs(shift)}"


def _rows_of(label: str, shift: int) -> str:
    return f"row t of {label} holds the state of token t{shift:+d}"
