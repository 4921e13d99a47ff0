"""Checks of files that need no model: structure, checksums, ids against the plan, values that cannot be right."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.checked_record import data_checksum
from ...models.errors import RunError
from ..progress import Done, Progress, Silent, Work
from .assignment import shard_index
from .columns import ROWS, Column
from .description import AUX, POST_NORM, PRE_NORM
from .diskio import read_file, tensor_bytes
from .errors import PlanError, ShardError
from .folder import OutputFolder, SealedShards, rejects_bytes
from .manifest import Manifest, differences
from .plan import PLAN_FILE, Plan
from .shard import Shard

CHUNK_BYTES = 16 << 20
HIDDEN_COLUMNS = (AUX, PRE_NORM, POST_NORM)
Severity = Literal["error", "warning"]
Witness = Literal["itself", "plan", "manifest", "model", "head"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("error") or odd ("warning") in a file; sample and tensor are None where all of it is.

    witness: what speaks against the file; "itself": its own checksums or its own words; "manifest", "head": that one is as
        likely at fault.
    """

    path: str
    sample_id: str | None
    tensor: str | None
    what: str
    severity: Severity
    witness: Witness = "itself"


def check_folder(
    path: Path, *, checksums: bool = True, values: bool = True, progress: Progress | None = None
) -> list[Finding]:
    """Check everything in an output folder; [] means that nothing was found.

    checksums: read every byte and compare. values: scan float columns for non-finite, all-zero and repeated rows.
    """
    progress = progress or Silent()
    folder = OutputFolder(path)
    findings = _check_manifest(folder)
    plan = None
    if folder.plan.exists():
        plan, found = _check_plan(folder, checksums)
        findings += found
    sealed = folder.sealed_shards()
    findings += _check_listed(folder, plan, sealed)
    findings += _check_cover(folder, plan, sealed)
    findings += [_error(folder.shard_path(index), str(error)) for index, error in sealed.broken.items()]
    progress.started(Work("checking files", len(sealed.shards), unit="shards"))
    for shard in sealed.shards.values():
        with shard:
            findings += check_shard(shard, plan, checksums=checksums, values=values)
        progress.advanced(Done(1))
    findings += [Finding(str(stray), None, None, "left by a killed run", "warning") for stray in folder.stray_files()]
    return findings


def check_shard(
    shard: Shard, plan: Plan | None = None, *, checksums: bool = True, values: bool = True
) -> list[Finding]:
    """Check one shard; with `plan` its samples and input_ids must be those that were planned for it."""
    findings: list[Finding] = []
    try:
        if checksums:
            _ = shard.samples, shard.checksums, shard.row_offsets, shard.mask_offsets
            findings += _wrong_sums(shard)
        if plan is not None:
            findings += _against_plan(shard, plan)
        if values:
            findings += [finding for column in shard.columns for finding in _odd_values(shard, column)]
    except ShardError as error:
        findings.append(_error(shard.path, str(error)))
    return findings


def _check_manifest(folder: OutputFolder) -> list[Finding]:
    try:
        manifest = Manifest.read(folder.manifest_path)
    except RunError as error:
        return [_error(folder.manifest_path, str(error))]
    findings = []
    for entry in manifest.shards:
        path = folder.path / entry.file
        found = path.stat().st_size if path.exists() else None
        if found != entry.bytes:
            state = "missing" if found is None else f"{found} bytes"
            what = f"{state}; the manifest lists it with {entry.bytes} bytes"
            findings.append(_error(path, what, witness="manifest"))
    findings += [_error(folder.manifest_path, what) for what in manifest.contradictions()]
    if not manifest.complete:
        findings.append(Finding(str(folder.manifest_path), None, None, "the capture is not complete", "warning"))
    return findings


def _check_listed(folder: OutputFolder, plan: Plan | None, sealed: SealedShards) -> list[Finding]:
    """Compare the manifest with the folder: the plan's summary, the shards, the rejects."""
    try:
        manifest = Manifest.read(folder.manifest_path)
    except RunError:
        return []  # told already
    path, findings = folder.manifest_path, []
    summary = plan.summary() if plan else {}
    changed = differences(
        {key: manifest.plan.get(key) for key in manifest.plan}, {k: summary.get(k) for k in manifest.plan}
    )
    if plan and changed:
        findings.append(_error(path, f"its summary of the plan is not {PLAN_FILE}'s: {'; '.join(changed)}"))
    listed = {entry.file: (entry.rows, entry.samples) for entry in manifest.shards}
    for shard in sealed.shards.values():
        found = listed.get(f"shards/{shard.path.name}")
        if found is None and manifest.complete:
            findings.append(_error(path, f"it calls the capture complete and does not list {shard.path.name}"))
        elif found not in (None, (shard.R, shard.M)):
            findings.append(
                _error(path, f"it lists {found} rows and samples for {shard.path.name}: {shard.R}, {shard.M}")
            )
    return findings + (_check_rejects(folder, plan, manifest, sealed) if manifest.complete else [])


def _check_rejects(folder: OutputFolder, plan: Plan | None, manifest: Manifest, sealed: SealedShards) -> list[Finding]:
    """rejects.jsonl beside its checksum, and beside what the plan and the shards rejected."""
    path = folder.rejects_path
    try:
        data = read_file(path)
    except FileNotFoundError:
        if manifest.rejects_crc32 is not None:
            return [_error(path, "missing; the manifest has its checksum")]
        data = b""  # a writer of shards alone has none
    if manifest.rejects_crc32 is not None and data_checksum(data) != manifest.rejects_crc32:
        return [
            _error(
                path, f"checksum {data_checksum(data)}, the manifest has {manifest.rejects_crc32}: it changed on disk"
            )
        ]
    if plan is None or sealed.broken:
        return []
    expected = [*plan.rejects(), *(reject for shard in sealed.shards.values() for reject in shard.rejects)]
    findings = [] if rejects_bytes(expected) == data else [_error(path, "it is not what plan and shards rejected")]
    if manifest.counts.get("rejected") != len(expected):
        what = f"it counts {manifest.counts.get('rejected')} rejects; plan and shards have {len(expected)}"
        findings.append(_error(folder.manifest_path, what))
    return findings


def _check_cover(folder: OutputFolder, plan: Plan | None, sealed: SealedShards) -> list[Finding]:
    findings = []
    absent = sorted(set(range(len(plan.shards))) - sealed.shards.keys() - sealed.broken.keys()) if plan else []
    if absent:
        shown = ", ".join(map(str, absent[:10]))
        what = f"{len(absent)} planned shards are not there yet: {shown}"
        findings.append(Finding(str(folder.shards), None, None, what, "warning"))
    indices = [index for shard in sealed.shards.values() for index in shard.sample_index.tolist()]
    repeated = len(indices) - len(set(indices))
    if repeated:
        findings.append(_error(folder.shards, f"{repeated} samples stand in more than one shard, or twice in one"))
    return findings


def _check_plan(folder: OutputFolder, checksums: bool) -> tuple[Plan | None, list[Finding]]:
    try:
        plan = Plan(folder.plan)
        damaged = plan.check() if checksums else []
    except PlanError as error:
        return None, [_error(folder.plan / PLAN_FILE, str(error))]
    return plan, [_error(folder.plan, what) for what in damaged]


def _wrong_sums(shard: Shard) -> Iterator[Finding]:
    for place, column in enumerate(shard.columns):
        offsets = shard.row_offsets if column.axis == ROWS else shard.mask_offsets
        for first, last in _batches(offsets, max(1, CHUNK_BYTES // max(1, column.row_bytes))):
            for position, value in enumerate(_sums(shard, column, offsets[first : last + 1]), first):
                expected = int(shard.checksums[position, place])
                # One reading may fail: what it says is asked again.
                if value != expected and _sums(shard, column, offsets[position : position + 2]) != [expected]:
                    what = f"checksum {value:08x}, {expected:08x} was sealed: its bytes changed on disk"
                    yield _error(shard.path, what, shard.samples.id(position), column.name)


def _batches(offsets: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Neighboring samples of at most `limit` entries together, or one that is longer: small samples share a read."""
    first, M = 0, len(offsets) - 1
    while first < M:
        fitting = int(np.searchsorted(offsets, offsets[first] + limit, side="right")) - 1
        last = min(M, max(fitting, first + 1))
        yield first, last
        first = last


def _sums(shard: Shard, column: Column, offsets: NDArray[np.int64]) -> list[int]:
    begin, end = int(offsets[0]), int(offsets[-1])
    if len(offsets) == 2:
        value = 0
        for part in _parts(shard, column, begin, end):
            value = zlib.crc32(tensor_bytes(part), value)
        return [value]
    data = tensor_bytes(shard.rows(column.name, begin, end))
    cuts = ((offsets - begin) * column.row_bytes).tolist()
    return [zlib.crc32(data[start:stop]) for start, stop in pairwise(cuts)]


def _parts(shard: Shard, column: Column, start: int, stop: int) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK_BYTES // max(1, column.row_bytes))
    for begin in range(start, stop, step):
        yield shard.rows(column.name, begin, min(stop, begin + step))


def _against_plan(shard: Shard, plan: Plan) -> list[Finding]:
    index = shard_index(shard.path.name)
    planned = plan.shards[index] if index is not None and index < len(plan.shards) else None
    if planned is None or not planned.is_held_by(shard):
        what = f"its samples are not those that the plan has for {shard.path.name}"
        return [_error(shard.path, what, witness="plan")]
    kept = torch.from_numpy(np.repeat(np.isin(planned.sample_index, shard.sample_index), planned.lengths))
    findings: list[Finding] = []
    for name, expected in zip(("input_ids", "loss_mask"), plan.tokens_of(planned), strict=True):
        wrong = (shard.rows(name, 0, shard.R) != expected[kept]).numpy()
        findings += [
            _error(shard.path, f"differs from the plan in {what}", who, name, "plan")
            for who, what in _places(wrong, shard)
        ]
    return findings


def _odd_values(shard: Shard, column: Column) -> list[Finding]:
    if column.name not in HIDDEN_COLUMNS:
        return []
    K = column.shape[0] if len(column.shape) == 2 else 1
    odd = {what: np.zeros((shard.R, K), np.bool_) for what in ("non-finite values", "all-zero rows")}
    repeated = np.zeros(shard.R, np.bool_)
    start, previous = 0, None
    for part in _parts(shard, column, 0, shard.R):
        rows_TKH = part.view(len(part), K, -1)
        stop = start + len(part)
        peak_TK = rows_TKH.float().abs().amax(-1)
        odd["non-finite values"][start:stop] = ~peak_TK.isfinite().numpy()
        odd["all-zero rows"][start:stop] = (peak_TK == 0).numpy()
        joined = rows_TKH if previous is None else torch.cat((previous, rows_TKH))
        repeated[stop - len(joined) + 1 : stop] = _equal_neighbors(joined)
        start, previous = stop, rows_TKH[-1:]
    repeated[shard.row_offsets[:-1]] = False
    odd["all-zero rows"][:, _slots_of_embeddings(shard, column)] = False
    findings = [
        _error(shard.path, f"{what} in {where} at slot {slot}", who, column.name)
        for what, mask_RK in odd.items()
        for slot in range(K)
        for who, where in _places(mask_RK[:, slot], shard)
    ]
    repeats = _places(repeated, shard)
    what = "equal to the row before in"
    return findings + [
        Finding(str(shard.path), who, column.name, f"{what} {where}", "warning") for who, where in repeats
    ]


def _slots_of_embeddings(shard: Shard, column: Column) -> list[int]:
    """Slots of `column` that hold boundary 0, where a padding id has a row of zeros and a run lets it be."""
    taps = shard.description.taps
    if taps is None or column.name != AUX:
        return []
    return [slot for slot, boundary in enumerate(taps.boundaries) if boundary == 0]


def _equal_neighbors(rows_TKH: torch.Tensor) -> NDArray[np.bool_]:
    """Return (T-1,): whether each row equals the one before; one value decides for nearly all rows."""
    equal = (rows_TKH[1:, 0, 0] == rows_TKH[:-1, 0, 0]).numpy().copy()
    candidates = torch.from_numpy(np.flatnonzero(equal))
    same = (rows_TKH[candidates + 1] == rows_TKH[candidates]).flatten(1).all(1)
    equal[candidates.numpy()] = same.numpy()
    return equal


def _places(wrong_R: NDArray[np.bool_], shard: Shard) -> list[tuple[str, str]]:
    """Per sample with a flagged row: its id, and how many tokens from which on."""
    flagged = np.flatnonzero(wrong_R)
    owners = np.searchsorted(shard.row_offsets, flagged, side="right") - 1
    positions, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    return [
        (
            shard.samples.id(position),
            f"{count} of its tokens, first at token {flagged[first] - shard.row_offsets[position]}",
        )
        for position, first, count in zip(positions.tolist(), firsts.tolist(), counts.tolist(), strict=True)
    ]


def _error(
    path: Path, what: str, sample_id: str | None = None, tensor: str | None = None, witness: Witness = "itself"
) -> Finding:
    return Finding(str(path), sample_id, tensor, what, "error", witness)
