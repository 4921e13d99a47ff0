"""Taking bad shards out, so that the capture that made the folder makes exactly these again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from ...models.errors import RunError, UsageError
from ..store import Finding, Manifest, OutputFolder, Plan, PlanError, shard_index
from ..store.diskio import sync_folder, write_atomically

REPAIRS_FILE = "repairs.jsonl"


def require_repairable(folder: OutputFolder) -> None:
    """UsageError where no capture could make a shard again: there is no whole plan."""
    try:
        Plan(folder.plan)
    except PlanError as error:
        raise UsageError(
            f"{folder.path} cannot be repaired: shards are made again from the plan of a capture. {error}"
        ) from error


def repair(folder: OutputFolder, findings: Iterable[Finding]) -> tuple[str, ...]:
    """Remove the shards that errors are about, and say in the manifest that the capture is not complete.

    Which, why and when is first added to OUT/repairs.jsonl. Returns their file names. Raises FolderLockedError where a run
    writes to the folder.
    """
    reasons: dict[Path, list[str]] = {}
    for finding in findings:
        path = Path(finding.path)
        if finding.severity == "error" and path.parent == folder.shards and shard_index(path.name) is not None:
            reasons.setdefault(path, []).append(finding.what)
    present = {path: whys for path, whys in reasons.items() if path.exists()}
    if present:
        with folder.lock():
            _write_down(folder, present)
            _reopen(folder, set(present))
            for path in present:
                path.unlink()
            sync_folder(folder.shards)
    return tuple(sorted(path.name for path in present))


def _write_down(folder: OutputFolder, reasons: dict[Path, list[str]]) -> None:
    path = folder.path / REPAIRS_FILE
    before = path.read_bytes() if path.exists() else b""
    now = int(time.time())
    lines = [
        json.dumps({"time": now, "removed": shard.name, "why": reasons[shard]}) + "\n" for shard in sorted(reasons)
    ]
    write_atomically(path, before + "".join(lines).encode())


def _reopen(folder: OutputFolder, bad: set[Path]) -> None:
    plan = Plan(folder.plan)
    kept = [shard for shard in folder.sealed_shards().shards.values() if shard.path not in bad]
    try:
        identity = Manifest.read(folder.manifest_path).identity
    except RunError:
        identity = plan.identity
    Manifest.from_shards(identity, plan.summary(), kept, complete=False).write(folder.manifest_path)
