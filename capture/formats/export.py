"""An export: rows of a capture, sample by sample, into a trainer's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..progress import Done, Progress, Silent, Work
from .captured import CapturedFolder
from .checksums import files_below, listed_sums, sums_of, write_sums
from .destination import OWN_FILES, destination, require_ours, write_record, write_samples
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
    """Write the capture `settings.source` in the layout `settings.to`; resume where an earlier run on `dest` stopped.

    Keeps one sample in memory at a time. Files are numbered in input order; the layout's own field, where it has one, and
    ``hiddentap-samples.jsonl`` map numbers to samples; ``hiddentap-export.sha256`` has the checksum of each file.

    Args:
        progress: receives reports; None shows nothing.

    Raises:
        FormatError: the layout cannot hold what is asked, or something it needs is missing.
        UsageError, RunError: as `CapturedFolder` and `destination`; no sample can be exported.

    Example:
        >>> summary = export_dataset(ExportSettings("OUT", to="specforge", dest="SPECFORGE", algorithm="eagle3"))
        >>> summary.samples, summary.files
        (5, 5)
    """
    progress = progress or Silent()
    layout = format_named(settings.to)
    _check_options(layout, settings)
    captured = CapturedFolder(settings.source)
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
        sums = _write_sums(settings.dest, before, progress)
        summary = _summary(job, files, len(before))
        write_record(
            settings.dest, identity, complete=True, samples=summary.samples, left_out=summary.left_out,
            truncated=summary.truncated, sums_sha256=sums,
        )  # fmt: skip
    return summary


def _write(exporter: Exporter, job: ExportJob, progress: Progress) -> tuple[int, list[Path]]:
    """Write every file with rows that is not there yet; returns how many there are, and those that were there before."""
    lengths = job.selection.lengths
    progress.started(Work("exporting", len(job), tokens=int(lengths.sum())))
    files, before = 0, []
    for piece in exporter.pieces():
        files += 1
        written = 0
        if piece.path.exists():
            before.append(piece.path)
        else:
            exporter.write(piece)
            written = piece.path.stat().st_size
        progress.advanced(Done(piece.stop - piece.first, int(lengths[piece.first : piece.stop].sum()), written=written))
    return files, before


def _write_sums(dest: Path, before: Sequence[Path], progress: Progress) -> str:
    """List the checksums of all files; a file that an earlier run wrote and listed keeps the checksum that it had then."""
    listed = listed_sums(dest)
    kept = {path.relative_to(dest).as_posix() for path in before} & listed.keys()
    new = [name for name in files_below(dest, OWN_FILES) if name not in kept]
    progress.started(Work("checksums", len(new), unit="files"))
    found = sums_of(dest, new, partial(progress.advanced, Done(1)))
    return write_sums(dest, {name: listed[name] for name in kept} | found)


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


def _draft_vocabulary(job: ExportJob) -> dict[str, str]:
    """Return what a second run must agree with of a given draft vocabulary: its tokens, wherever its file lies."""
    return {} if job.existing_vocabulary is None else {"draft_vocab": job.existing_vocabulary.sha256}


def _identity(job: ExportJob) -> dict[str, Any]:
    settings, about = job.settings, job.captured.about.json
    return {
        "to": settings.to,
        "algorithm": settings.algorithm,
        "options": settings.chosen() | _draft_vocabulary(job),
        "min_supervised": settings.min_supervised,
        "capture_sha256": job.captured.fingerprint,
        "head_sha256": job.head.fingerprint,
        "model": about.get("model"),
        "taps": about["taps"],
        "compute_dtype": about.get("compute_dtype"),
        "store_dtype": about.get("store_dtype"),
    }
