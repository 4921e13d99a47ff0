"""An import: a foreign data set, sample by sample, into shards of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...models.errors import RunError, UsageError
from ..progress import Done, Progress, Silent, Work
from ..store import FORMAT_VERSION, GrowingShardWriter, Manifest, OutputFolder, Shard, differences
from ..store.diskio import require_folder
from .captured import Who
from .claim import Claim, claim_of
from .destination import read_record
from .errors import LayoutError, SampleError
from .foreign_names import sample_names
from .layout import ForeignSample, Reader
from .registry import format_named
from .settings import ImportSettings
from .taken import Columns


@dataclass(frozen=True)
class ImportSummary:
    """Counts of a finished import; `captured` and `rejected` add up to the samples of the data set.

    Attributes:
        shards, shards_done_before: how many there are, and how many an earlier run had sealed.
        boundaries: the layers as they were claimed. final: which norm state was taken over, or "none".
    """

    out: Path
    captured: int
    rejected: int
    tokens: int
    shards: int
    shards_done_before: int
    boundaries: tuple[int, ...]
    hidden_size: int
    final: str


def import_dataset(settings: ImportSettings, progress: Progress | None = None) -> ImportSummary:
    """Read `settings.folder` as `settings.layout` and fill `settings.out`; resume where an earlier run stopped.

    Settings, files and the record of an export state what the rows are. This function believes them; `verify` checks them.

    Args:
        progress: receives reports; None shows nothing.

    Raises:
        FormatError: neither the files nor the settings state enough.
        LayoutError: the files are not of the layout.
        UsageError: `folder` is no folder, or `out` holds something else.

    Example:
        >>> exported = export_dataset(ExportSettings("OUT", to="specforge", dest="SPECFORGE", algorithm="eagle3"))
        >>> import_dataset(ImportSettings("SPECFORGE", layout="specforge", out="OUT2", model="MODEL")).captured
        5
    """
    progress = progress or Silent()
    require_folder(settings.folder, f"a folder of {settings.layout} files")
    reader = format_named(settings.layout).reader(settings)
    if not len(reader):
        raise LayoutError(f"{settings.folder} holds no sample.")
    claim = claim_of(settings, reader.stated, read_record(settings.folder))
    columns = _columns(reader, claim, settings)
    identity = _identity(settings, claim, columns)
    folder = OutputFolder(settings.out)
    with folder.lock():
        folder.remove_stray_files()
        _require_same(folder, identity)
        Manifest.from_shards(identity, {}, [], complete=False).write(folder.manifest_path)
        run = _Import(settings, reader, folder, columns, identity, progress)
        shards, before = run.fill()
        return _finish(settings, folder, identity, shards, before, columns)


@dataclass(frozen=True)
class _Import:
    settings: ImportSettings
    reader: Reader
    folder: OutputFolder
    columns: Columns
    identity: dict[str, Any]
    progress: Progress

    def fill(self) -> tuple[list[Shard], int]:
        """Make the shards that are not there yet; returns all of them and how many were there."""
        shards = self._sealed()
        before = len(shards)
        start = _samples_in(shards)
        self.progress.started(
            Work("importing", len(self.reader), done=start, done_tokens=sum(shard.R for shard in shards))
        )
        names = sample_names(self.settings.folder, start)
        while start < len(self.reader):
            shards.append(self._shard(len(shards), start, names))
            start = _samples_in(shards)
        return shards, before

    def _shard(self, index: int, start: int, names: Iterator[Who]) -> Shard:
        metadata = {**self.identity, "made_with": {"hiddentap": version("hiddentap"), "compiled": "off"}}
        with GrowingShardWriter(self.folder.shard_path(index), self.columns.as_columns(), metadata) as writer:
            for number in range(start, len(self.reader)):
                self._add(writer, number, names)
                if writer.rows >= self.settings.shard_rows:
                    break
            return writer.seal()

    def _add(self, writer: GrowingShardWriter, number: int, names: Iterator[Who]) -> None:
        who = next(names, None)
        if who is None:
            raise LayoutError(f"{self.settings.folder} lists fewer samples than it holds ({len(self.reader)}).")
        sample, fault = _read(self.reader, number)
        name = sample.sample_id if sample and sample.sample_id is not None else who.sample_id
        handle = writer.begin(number, name, who.source, who.line)
        if sample is None:
            writer.reject(handle, fault, {"code": "foreign"})
            self.progress.advanced(Done(1, rejected=1))
            return
        try:
            rows = self.columns.rows(sample)
            writer.append(handle, rows)
        except LayoutError as error:
            raise LayoutError(f"{self.settings.folder}, sample {number} ({name!r}): {error}") from error
        self.progress.advanced(Done(1, len(sample.input_ids), written=sum(column.nbytes for column in rows.values())))

    def _sealed(self) -> list[Shard]:
        """Return the shards that an earlier run sealed, without a gap; what lies behind a gap goes."""
        found = self.folder.sealed_shards()
        kept: list[Shard] = []
        while len(kept) in found.shards:
            kept.append(found.shards[len(kept)])
        for index in (found.shards.keys() | found.broken.keys()) - set(range(len(kept))):
            self.progress.note(f"{self.folder.shard_path(index).name} is not whole or out of order; it is made again")
            self.folder.shard_path(index).unlink()
        return kept


def _read(reader: Reader, number: int) -> tuple[ForeignSample | None, str]:
    try:
        sample = reader.read(number)
    except SampleError as fault:
        return None, str(fault)
    return (sample, "") if len(sample.input_ids) else (None, "it has no row")


def _columns(reader: Reader, claim: Claim, settings: ImportSettings) -> Columns:
    for number in range(len(reader)):
        sample, _ = _read(reader, number)
        if sample is not None:
            try:
                columns = Columns.of(sample, claim, settings.final or reader.final)
                columns.rows(sample)
            except LayoutError as error:
                raise LayoutError(f"{settings.folder}, sample {number}: {error}") from error
            return columns
    raise LayoutError(f"{settings.folder}: none of its {len(reader)} samples can be read.")


def _identity(settings: ImportSettings, claim: Claim, columns: Columns) -> dict[str, Any]:
    dtype = str(columns.dtype).removeprefix("torch.")
    return {
        "format_version": FORMAT_VERSION,
        "model": dict(claim.model),
        "taps": claim.taps(columns.H, columns.final or "none"),
        "compute_dtype": claim.compute_dtype or dtype,
        "store_dtype": dtype,
        "attn_implementation": None,
        "mode": "imported",
        "tokenisation": None,
        "data": [{"name": settings.folder.name, "layout": settings.layout}],
        "shard_rows": settings.shard_rows,
    }


def _require_same(folder: OutputFolder, identity: dict[str, Any]) -> None:
    if not folder.manifest_path.exists():
        return
    changed = differences(Manifest.read(folder.manifest_path).identity, identity)
    if changed:
        raise UsageError(
            f"{folder.path} holds another run; choose another folder, or ask for the same again. What differs (there -> now):\n  "
            + "\n  ".join(changed)
        )


def _samples_in(shards: list[Shard]) -> int:
    return sum(shard.M + len(shard.rejects) for shard in shards)


def _finish(
    settings: ImportSettings,
    folder: OutputFolder,
    identity: dict[str, Any],
    shards: list[Shard],
    before: int,
    columns: Columns,
) -> ImportSummary:
    rejects = [reject for shard in shards for reject in shard.rejects]
    checksum = folder.write_rejects(rejects)
    codes = Counter(reject.code for reject in rejects)
    counts = {"rejected": len(rejects), "rejected_by_code": dict(codes)}
    Manifest.from_shards(identity, {}, shards, complete=True, counts=counts, rejects_crc32=checksum).write(
        folder.manifest_path
    )
    if not sum(shard.M for shard in shards):
        raise RunError(f"nothing was imported from {settings.folder}; {folder.rejects_path} says why.")
    return ImportSummary(
        out=folder.path,
        captured=sum(shard.M for shard in shards),
        rejected=len(rejects),
        tokens=sum(shard.R for shard in shards),
        shards=len(shards),
        shards_done_before=before,
        boundaries=tuple(identity["taps"]["boundaries"]),
        hidden_size=columns.H,
        final=columns.final or "none",
    )
