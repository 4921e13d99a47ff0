"""An export held against the checksums that were written with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...models.errors import UsageError
from ..progress import Done, Progress, Silent, Work
from ..store import Finding
from .checksums import SUMS_FILE, file_sum, files_below, listed_sums, sums_of
from .destination import EXPORT_FILE, OWN_FILES, read_record


@dataclass(frozen=True)
class ExportCheck:
    """Findings of a check of an export.

    Attributes:
        path: the folder of the export.
        files: how many were read, and their `bytes`.
        findings: one per file that is missing, changed, or of no export ("warning").
    """

    path: Path
    files: int
    bytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing was found."""
        return not self.findings


def is_export(path: Path) -> bool:
    """Return whether `path` is a folder that `export_dataset` filled."""
    return (path / EXPORT_FILE).is_file()


def check_export(path: str | Path, progress: Progress | None = None) -> ExportCheck:
    """Read every file of an export, and compare it with the checksum that was written when the export ended.

    Args:
        path: the folder that was exported to.
        progress: receives reports; None shows nothing.

    Raises:
        UsageError: no export of ours, or one of an earlier release, which wrote no checksums.
        LayoutError: its record or its list of checksums is damaged.

    Example:
        >>> summary = export_dataset(ExportSettings("OUT", to="specforge", dest="SPECFORGE", algorithm="eagle3"))
        >>> check_export("SPECFORGE").ok
        True
    """
    path, progress = Path(path), progress or Silent()
    record = read_record(path)
    if record is None:
        raise UsageError(f"{path} is no export: it has no {EXPORT_FILE}.")
    if not record["complete"]:
        return ExportCheck(path, 0, 0, (_error(path, "the export is not complete; run it again to finish it"),))
    stated = record.get("sums_sha256")
    if stated is None:
        raise UsageError(
            f"{path} has no checksums: an earlier release wrote it. Run the same export again to add them."
        )
    if not (path / SUMS_FILE).is_file() or file_sum(path / SUMS_FILE) != stated:
        what = "missing or changed since the export, so no file can be checked; export again into another folder"
        return ExportCheck(path, 0, 0, (_error(path / SUMS_FILE, what),))
    listed = listed_sums(path)
    there = [name for name in listed if (path / name).is_file()]
    progress.started(Work("checking files", len(there), unit="files"))
    found = sums_of(path, there, partial(progress.advanced, Done(1)))
    findings = [
        _error(path / name, "missing; run the same export again to write it")
        for name in sorted(listed.keys() - found.keys())
    ]
    findings += [
        _error(
            path / name,
            f"its bytes changed on disk: SHA-256 {found[name]}, {listed[name]} was written; remove it and run the same "
            "export again",
        )
        for name in there
        if found[name] != listed[name]
    ]
    foreign = [name for name in files_below(path, OWN_FILES) if name not in listed]
    findings += [Finding(str(path / name), None, None, "no file of this export", "warning") for name in foreign]
    size = sum((path / name).stat().st_size for name in there)
    return ExportCheck(path, len(there), size, tuple(findings))


def _error(path: Path, what: str) -> Finding:
    return Finding(str(path), None, None, what, "error")
