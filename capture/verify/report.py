"""Findings of a check of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..store import Finding
from .fault_lines import fault_lines


@dataclass(frozen=True)
class TapAgreement:
    """Stored rows of one tap beside a plain forward in the dtype that the run computed in.

    Attributes:
        tap, state: what it is called, and which state it is said to be.
        rows, bit_equal: rows compared, and those of them that are equal bit for bit.
        median, largest: of |stored - plain| / |plain| of each row.
        allowed: how far rows may be from the plain forward, in words.
    """

    tap: str
    state: str
    rows: int
    bit_equal: int
    median: float
    largest: float
    allowed: str

    def __str__(self) -> str:
        equal = "all" if self.bit_equal == self.rows else f"{self.bit_equal} of {self.rows}"
        error = f"row error median {self.median:.1e}, largest {self.largest:.1e}"
        return f"{self.state}: {equal} rows bit-equal, {error}; allowed: {self.allowed}"


@dataclass(frozen=True)
class Report:
    """The result of a verification: what was checked, and what was found.

    Attributes:
        path: the folder that was checked.
        findings: one per fault ("error") or oddity ("warning").
        shards: sealed ones.
        samples: in these shards.
        rows: in these shards.
        compared: samples that were compared with a model.
        reference: the model they were compared with, None where none were.
        agreement: how near the stored rows came, by tap.
        notes: what was not checked and why, and how well the head predicts the text.
        repaired: file names of the shards that were removed to be captured again.

    Example:
        >>> report = verify("OUT", model="none")
        >>> report.ok, report.conclusion
        (True, 'OK: no problems found; no sample was compared with a model')
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
        """Return whether nothing was found."""
        return not self.findings

    @property
    def conclusion(self) -> str:
        """Return the result in one line: how much was found, and whether samples were compared with a model."""
        found = f"{len(self.findings)} problems found" if self.findings else "OK: no problems found"
        if not self.compared:
            return f"{found}; no sample was compared with a model"
        return f"{found}; {self.compared} of {self.samples:,} samples were compared with a model"

    def table(self) -> list[tuple[str, str]]:
        """Return name and value of what was checked."""
        rows = [("files", f"{self.shards} shards, {self.samples:,} samples, {self.rows:,} rows")]
        if self.reference:
            rows.append(("compared", f"{self.compared} samples with {self.reference}"))
        rows += [(agreement.tap, str(agreement)) for agreement in self.agreement]
        rows += [("note", note) for note in self.notes]
        rows += [("removed", f"{name}: the same capture command makes it again") for name in self.repaired]
        return rows

    def faults(self) -> Iterator[str]:
        """Return the findings in words, one line a kind; see `fault_lines`."""
        return fault_lines(self.path, self.findings)

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.table()]
        return "\n".join([*lines, *self.faults(), self.conclusion])
