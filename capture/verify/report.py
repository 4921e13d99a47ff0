"""What a check of a folder found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..store import Finding


@dataclass(frozen=True)
class TapAgreement:
    """Stored rows of one tap beside a plain forward in the dtype that the run computed in.

    Attributes:
        tap, state: what it is called, and which state it is said to be.
        rows, bit_equal: rows compared, and those of them that are equal bit for bit.
        median, largest: of |stored - plain| / |plain| of each row.
    """

    tap: str
    state: str
    rows: int
    bit_equal: int
    median: float
    largest: float

    def __str__(self) -> str:
        equal = "all" if self.bit_equal == self.rows else f"{self.bit_equal} of {self.rows}"
        return f"{self.state}: {equal} rows bit-equal, row error median {self.median:.1e}, largest {self.largest:.1e}"


@dataclass(frozen=True)
class Report:
    """What was looked at, and what was found.

    Attributes:
        findings: one for each thing that is wrong ("error") or odd ("warning").
        shards: sealed ones.
        samples: that they hold.
        rows: that they hold.
        compared: samples that were compared with a model; reference: what with, None where nothing was.
        agreement: how near the stored rows came, by tap.
        notes: what was not done and why, and how well the head predicts the text.
        repaired: file names of the shards that were removed to be made again.
    """

    path: Path
    findings: tuple[Finding, ...]
    shards: int
    samples: int
    rows: int
    compared: int
    reference: str | None
    agreement: tuple[TapAgreement, ...]
    notes: tuple[str, ...]
    repaired: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def conclusion(self) -> str:
        """The result in one line: how much was found, and whether samples were compared with a model."""
        found = f"{len(self.findings)} findings" if self.findings else "nothing was found"
        if not self.compared:
            return f"{found}; no sample was compared with a model"
        return f"{found}; {self.compared} of {self.samples:,} samples were compared with a model"

    def table(self) -> list[tuple[str, str]]:
        """Name and value of what was looked at."""
        rows = [("files", f"{self.shards} shards, {self.samples:,} samples, {self.rows:,} rows")]
        if self.reference:
            rows.append(("compared", f"{self.compared} samples with {self.reference}"))
        rows += [(agreement.tap, str(agreement)) for agreement in self.agreement]
        rows += [("note", note) for note in self.notes]
        rows += [("removed", f"{name}: the same capture command makes it again") for name in self.repaired]
        return rows

    def faults(self) -> Iterator[str]:
        """The findings in words, those that differ only in their shard as one."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.severity, _where(finding) + finding.what), []).append(finding)
        for (severity, what), group in groups.items():
            files = list(dict.fromkeys(self._name(finding.path) for finding in group))
            more = f" and {len(files) - 3} more files" if len(files) > 3 else ""
            yield f"{severity}: {', '.join(files[:3])}{more}: {what}"

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.table()]
        return "\n".join([*lines, *self.faults(), self.conclusion])

    def _name(self, path: str) -> str:
        found = Path(path)
        return str(found.relative_to(self.path)) if found.is_relative_to(self.path) and found != self.path else path


def _where(finding: Finding) -> str:
    parts = [f"sample {finding.sample_id!r}"] if finding.sample_id is not None else []
    parts += [finding.tensor] if finding.tensor is not None else []
    return f"{', '.join(parts)}: " if parts else ""
