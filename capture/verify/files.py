"""Checks that need no model: the store's own, headers that agree, tokens that follow each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...models.errors import RunError
from ..progress import Done, Progress, Work
from ..store import (
    Finding,
    Manifest,
    OutputFolder,
    Plan,
    PlanError,
    Shard,
    ShardError,
    check_folder,
    check_shard,
    differences,
)
from ..store.plan import PLAN_FILE

# May differ between two runs on one folder.
_MADE_WITH = "made_with"


def check_structure(folder: OutputFolder, progress: Progress) -> list[Finding]:
    """Manifest, plan, headers, sizes, checksums, and tokens against the plan."""
    return check_folder(folder.path, checksums=True, values=False, progress=progress)


def check_values(shards: Collection[Shard], progress: Progress) -> list[Finding]:
    """Rows that are not finite, all zero or repeated."""
    progress.started(Work("checking values", len(shards), unit="shards"))
    findings: list[Finding] = []
    for shard in shards:
        with shard:
            findings += check_shard(shard, checksums=False, values=True)
        progress.advanced(Done(1))
    return findings


def check_headers(folder: OutputFolder, shards: Mapping[int, Shard]) -> list[Finding]:
    """Plan, manifest and every header say the same of model, taps and the rest of the run."""
    identity, manifest = _plan_identity(folder), _manifest_identity(folder)
    told = {shard.path: _lasting(shard.metadata) for shard in shards.values()}
    findings = []
    changed = _contradictions(identity, manifest)
    if changed and _agreeing(told.values(), manifest) > _agreeing(told.values(), identity):
        what = f"it is of another run than the manifest and the shards: {changed[0]}"
        findings.append(Finding(str(folder.plan / PLAN_FILE), None, None, what, "error"))
        identity = manifest
    elif changed:
        what = f"it is of another run than the plan: {changed[0]}"
        findings.append(Finding(str(folder.manifest_path), None, None, what, "error"))
    # Without either, the first header is as good as any.
    agreed = identity or manifest or next(iter(told.values()), {})
    for path, about in told.items():
        changed = _contradictions(agreed, about)
        if changed:
            what = f"its header is of another run than the folder: {changed[0]}"
            findings.append(Finding(str(path), None, None, what, "error", "plan"))
    return findings


def _agreeing(told: Iterable[Mapping[str, Any]], identity: Mapping[str, Any]) -> int:
    """Return how many headers do not contradict `identity`."""
    return sum(not _contradictions(identity, about) for about in told)


def check_following(shards: Iterable[Shard]) -> list[Finding]:
    """Check that the token sampled from each row of a generation is the input of the next row."""
    findings: list[Finding] = []
    for shard in shards:
        names = {column.name for column in shard.columns}
        if {"input_ids", "output_ids"} <= names:
            with shard:
                try:
                    findings += _not_following(shard)
                except ShardError:
                    continue  # told by the check of the structure
    return findings


def _not_following(shard: Shard) -> list[Finding]:
    input_ids, output_ids = (shard.rows(name, 0, shard.R).numpy() for name in ("input_ids", "output_ids"))
    wrong = (output_ids[:-1] >= 0) & (output_ids[:-1] != input_ids[1:])
    wrong[shard.row_offsets[1:-1] - 1] = False  # the next row is another sample's
    places = np.flatnonzero(wrong)
    owners = np.searchsorted(shard.row_offsets, places, side="right") - 1
    findings = []
    for owner in np.unique(owners):
        own = places[owners == owner]
        what = (
            f"is not the input of the next row at {len(own)} tokens, first at token {own[0] - shard.row_offsets[owner]}"
        )
        findings.append(Finding(str(shard.path), shard.samples.id(int(owner)), "output_ids", what, "error"))
    return findings


def _plan_identity(folder: OutputFolder) -> dict[str, Any]:
    try:
        return Plan(folder.plan).identity
    except PlanError:
        return {}  # no plan, or one that the check of the structure reports


def _manifest_identity(folder: OutputFolder) -> dict[str, Any]:
    try:
        return Manifest.read(folder.manifest_path).identity
    except RunError:
        return {}  # told by the check of the structure


def _contradictions(agreed: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    both = agreed.keys() & other.keys()
    return differences({key: agreed[key] for key in both}, {key: other[key] for key in both})


def _lasting(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != _MADE_WITH}
