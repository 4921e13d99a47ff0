"""Taking bad shards out, so that the capture that made the folder makes exactly these again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...models.errors import RunError, UsageError
from ..store import Finding, Manifest, OutputFolder, Plan, PlanError, shard_index
from ..store.diskio import sync_folder, write_atomically
from ..store.plan import PLAN_FILE

REPAIRS_FILE = "repairs.jsonl"


def require_repairable(folder: OutputFolder) -> None:
    """UsageError where no capture could make a shard again: there is no whole plan."""
    try:
        Plan(folder.plan).require_whole()
    except PlanError as error:
        raise UsageError(
            f"{folder.path} cannot be repaired: shards are made again from the plan of a capture. {error}"
        ) from error


@dataclass(frozen=True)
class Repaired:
    """Result of a repair.

    removed: names of shards that are to be made again. kept: in words, which shards one witness alone speaks against.
    """

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def repair(folder: OutputFolder, findings: Iterable[Finding], doubt_of_model: str | None) -> Repaired:
    """Remove the shards that are proved wrong, and say in the manifest that the capture is not complete.

    A shard goes where its own checksums fail, or its own rows contradict its header; where the plan speaks against it and the
    manifest agrees with the plan; or where the model does and all its weights are those that were captured. What one witness
    alone says is named and left.

    Which, why and when is first added to OUT/repairs.jsonl.

    Args:
        doubt_of_model: why the model may not be believed, None where all of its weights are the captured ones.

    Raises:
        FolderLockedError: a run writes to the folder.
    """
    reasons: dict[Path, list[Finding]] = {}
    others = []
    for finding in findings:
        path = Path(finding.path)
        if finding.severity != "error" or finding.witness in ("manifest", "head"):
            continue
        if path.parent != folder.shards or shard_index(path.name) is None:
            others.append(finding)
        elif path.exists():
            reasons.setdefault(path, []).append(finding)
    doubts = {"itself": None, "plan": _doubt_of_plan(folder, others), "model": doubt_of_model}
    proved = {
        path: [finding.what for finding in found]
        for path, found in reasons.items()
        if any(doubts[finding.witness] is None for finding in found)
    }
    if proved:
        with folder.lock():
            _write_down(folder, proved)
            _reopen(folder, set(proved))
            for path in proved:
                folder.remove_shard(shard_index(path.name) or 0)
            sync_folder(folder.shards)
    kept = dict.fromkeys(
        f"{path.name} was not removed: {doubts[finding.witness]}"
        for path, found in sorted(reasons.items())
        if path not in proved
        for finding in found
    )
    return Repaired(tuple(sorted(path.name for path in proved)), tuple(kept))


def _doubt_of_plan(folder: OutputFolder, others: Iterable[Finding]) -> str | None:
    """Return why the plan alone does not condemn a whole shard; None if the manifest agrees with the plan."""
    about = [finding for finding in others if Path(finding.path) in (folder.manifest_path, folder.plan / PLAN_FILE)]
    if not about:
        return None
    return (
        f"the plan alone speaks against it, and plan and manifest disagree ({Path(about[0].path).name}: {about[0].what}); "
        "the same capture command makes the plan again from its data and keeps the shards that agree"
    )


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
