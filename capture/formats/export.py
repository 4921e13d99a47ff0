"""An export: rows of a capture, sample by sample, into a trainer's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..progress import Progress, Silent, Work
from .captured import Captured
from .destination import destination, require_ours, write_record, write_samples
from .errors import FormatError
from .head_folder import HeadFolder
from .job import ExportJob
from .layout import Exporter, Format
from .registry import format_named
from .settings import ExportSettings


@dataclass(frozen=True)
class ExportSummary:
    """Counts of a finished export.

    Attributes:
        samples, tokens: exported, those of earlier runs included.
        left_out: samples that the layout cannot use, by reason. truncated: samples that were cut.
        files, files_done_before: with rows; of those, how many an earlier run had written.
    """

    dest: Path
    samples: int
    tokens: int
    left_out: dict[str, int]
    truncated: int
    files: int
    files_done_before: int


def export_dataset(settings: ExportSettings, progress: Progress | None = None) -> ExportSummary:
    """Write the capture `settings.source` as `settings.to` wants it; go on where an earlier run on `dest` stopped.

    One sample is in memory at a time. Files are named by zero-padded numbers in input order; which sample a number is
    stands in the layout's own field where it has one, and in ``hiddentap-samples.jsonl``.

    Raises:
        FormatError: the layout cannot hold what is asked, or something it needs is missing.
        UsageError, RunError: as `Captured` and `destination`; no sample can be exported.
    """
    progress = progress or Silent()
    layout = format_named(settings.to)
    _check_options(layout, settings)
    captured = Captured(settings.source)
    head = HeadFolder(
        settings.head or settings.source / "head", captured.taps, trust_remote_code=settings.trust_remote_code
    )
    job = ExportJob(captured, head, settings, layout.rule(settings), progress)
    identity = _identity(job)
    require_ours(settings.dest, identity)
    exporter = layout.exporter(job)
    job.prepare()
    with destination(settings.dest, identity):
        files, before = _write(exporter, job, progress)
        exporter.finish()
        write_samples(settings.dest, job)
        summary = _summary(job, files, before)
        write_record(
            settings.dest, identity, complete=True, samples=summary.samples, left_out=summary.left_out,
            truncated=summary.truncated,
        )  # fmt: skip
    return summary


def _write(exporter: Exporter, job: ExportJob, progress: Progress) -> tuple[int, int]:
    lengths = job.selection.lengths
    progress.started(Work("exporting", len(job), tokens=int(lengths.sum())))
    files = before = 0
    for piece in exporter.pieces():
        files += 1
        written = 0
        if piece.path.exists():
            before += 1
        else:
            exporter.write(piece)
            written = piece.path.stat().st_size
        progress.advanced(piece.stop - piece.first, int(lengths[piece.first : piece.stop].sum()), written=written)
    return files, before


def _summary(job: ExportJob, files: int, before: int) -> ExportSummary:
    chosen = job.selection
    return ExportSummary(
        job.dest, len(job), int(chosen.lengths.sum()), chosen.left_out, chosen.truncated, files, before
    )


def _check_options(layout: Format, settings: ExportSettings) -> None:
    if layout.algorithms and settings.algorithm not in layout.algorithms:
        given = "none was given" if settings.algorithm is None else f"got {settings.algorithm!r}"
        raise FormatError(
            f"{layout.name} has a layout per algorithm; give --algorithm {' or '.join(layout.algorithms)} ({given})."
        )
    if settings.algorithm is not None and not layout.algorithms:
        raise FormatError(
            f"{layout.name} has one layout for all algorithms; leave --algorithm {settings.algorithm} out."
        )
    foreign = sorted(settings.chosen().keys() - layout.options)
    if foreign:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise FormatError(f"{options} means nothing to {layout.name}; leave it out.")


def _identity(job: ExportJob) -> dict[str, Any]:
    settings, about = job.settings, job.captured.metadata
    return {
        "to": settings.to,
        "algorithm": settings.algorithm,
        "options": settings.chosen(),
        "min_supervised": settings.min_supervised,
        "capture_sha256": job.captured.fingerprint,
        "head_sha256": job.head.fingerprint,
        "model": about.get("model"),
        "taps": about["taps"],
        "compute_dtype": about.get("compute_dtype"),
        "store_dtype": about.get("store_dtype"),
    }
