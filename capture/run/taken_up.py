"""A folder that an earlier run began: whether its plan can be believed, and what becomes of it and of its shards.

Plan, shards and data are three witnesses. A plan whose checksums hold and which no whole shard contradicts is believed. Otherwise
it is made again from the data, and believed if every whole shard agrees with it; where one does not, nothing is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...models.errors import RunError, UsageError
from ..identity import identity_differences
from ..progress import Progress
from ..store import Manifest, OutputFolder, Plan, PlanDamagedError, SealedShards, Shard, ShardError
from ..store.diskio import naming, sync_folder

# Modes of shards that no run of a plan made; every engine has a mode of its own.
_WITHOUT_PLAN = (None, "generation", "imported")


def plan_there(folder: OutputFolder, sealed: SealedShards) -> tuple[Plan | None, str | None]:
    """Return the plan of an earlier run, None where there is none, and what speaks against it, None where nothing does.

    Raises:
        NewerFormatError, FileAccessError: a plan of which nothing can be said.
    """
    if not folder.has_plan:
        return None, "the plan is missing" if sealed.shards else None
    try:
        plan = Plan(folder.plan)
        plan.require_whole()
        others = [index for index, shard in sealed.shards.items() if not is_of(shard, index, plan)]
    except PlanDamagedError as error:
        return None, str(error)
    if others and _manifest_names(folder, plan):  # two witnesses against each of these shards
        for index in others:
            del sealed.shards[index]
            sealed.broken[index] = ShardError(f"{folder.shard_path(index)}: plan and manifest are of another run.")
    elif others:
        return plan, f"{_names(folder, others)} hold other samples, or are of another run, than {folder.plan} says"
    return plan, None


def believed_plan(folder: OutputFolder) -> Plan | None:
    """Return the plan of an earlier run where nothing speaks against it; None where there is none, or one to be made again."""
    if not folder.has_plan:
        return None
    try:
        plan = Plan(folder.plan)
    except PlanDamagedError:
        return None
    if plan.crc32 is not None:
        return plan
    # A plan of the first release cannot speak for itself: its shards do.
    return plan if plan_there(folder, folder.sealed_shards())[1] is None else None


def _manifest_names(folder: OutputFolder, plan: Plan) -> bool:
    """Return whether the manifest was written for this very plan, by the checksums of both."""
    try:
        manifest = Manifest.read(folder.manifest_path)
    except RunError:
        return False
    return plan.crc32 is not None and manifest.plan.get("crc32") == plan.crc32


def is_of(shard: Shard, index: int, plan: Plan) -> bool:
    """Return whether a whole shard is number `index` of `plan`: its samples, captured as its identity says."""
    if index >= len(plan.shards) or not plan.shards[index].is_held_by(shard):
        return False
    return shard.sources == plan.sources and not identity_differences(shard.metadata, plan.identity)


def require_same_run(folder: OutputFolder, sealed: SealedShards, identity: Mapping[str, Any]) -> None:
    """See that whole shards whose plan cannot be believed are of the run that is asked for.

    Raises:
        UsageError: they are of another run, of a generation or of an import; nothing is written over them.
    """
    if not sealed.shards and not folder.has_plan:
        raise UsageError(_unplanned(folder, len(sealed.broken)))
    for index, shard in sealed.shards.items():
        about = shard.metadata
        if about.get("mode") in _WITHOUT_PLAN:
            raise UsageError(_unplanned(folder, len(sealed.shards) + len(sealed.broken)))
        changed = identity_differences(about, identity)
        if changed:
            before = "" if folder.has_plan else _unplanned(folder, len(sealed.shards) + len(sealed.broken)) + " "
            raise UsageError(
                f"{before}{folder.shard_path(index)} is of another run; choose another folder, or ask for the same again. "
                "What differs (there -> now):\n  " + "\n  ".join(changed)
            )


def plan_again(
    folder: OutputFolder, sealed: SealedShards, fault: str, make: Callable[[Path], Plan], progress: Progress
) -> Plan:
    """Make the plan again from the data, beside the one that `fault` speaks against, and put it in its place.

    Raises:
        RunError: a whole shard contradicts the new plan too; everything stays as it was.
    """
    progress.note(f"the plan is made again from the data: {fault}")
    place = folder.path / "plan.again"
    _remove(place)
    try:
        made = make(place)
        others = [index for index, shard in sealed.shards.items() if not _agrees(shard, index, made)]
        if others:
            raise RunError(
                f"{fault}; and {_names(folder, others)} hold other tokens or names than the plan that is made of the data now. "
                "Nothing was removed. Restore the data and the tokenizer as they were, move these shards away, or choose another "
                "folder."
            )
        _remove(folder.plan)
        with naming(folder.plan, "written"):
            place.rename(folder.plan)
        sync_folder(folder.path)
    finally:
        _remove(place)
    progress.note(f"{len(sealed.shards)} shard(s) agree with the plan that was made again, and are kept")
    return Plan(folder.plan)


def _agrees(shard: Shard, index: int, plan: Plan) -> bool:
    if not is_of(shard, index, plan):
        return False
    planned = plan.shards[index]
    with shard:
        try:
            found = [shard.rows(name, 0, shard.R) for name in ("input_ids", "loss_mask")]
            ids = [shard.samples.id(position) for position in range(shard.M)]
        except ShardError:  # damaged inside: that is found, and mended, by `verify`; its header speaks for its plan
            return True
    gone = {reject.sample_index for reject in shard.rejects}
    named = plan.samples_of(planned)
    kept = [place for place, sample in enumerate(planned.sample_index.tolist()) if sample not in gone]
    if ids != [named.id(place) for place in kept]:
        return False
    rows = planned.rows_of(kept)
    return all(
        bool(tokens.equal(expected[rows])) for tokens, expected in zip(found, plan.tokens_of(planned), strict=True)
    )


def _unplanned(folder: OutputFolder, shards: int) -> str:
    return (
        f"{folder.path} holds {shards} shard(s) and no plan: a generation, an import, or a run whose shards are all damaged. "
        "Choose another folder, or remove the shards first."
    )


def _names(folder: OutputFolder, indices: list[int]) -> str:
    shown = ", ".join(folder.shard_path(index).name for index in indices[:3])
    return shown + (f" and {len(indices) - 3} more" if len(indices) > 3 else "")


def _remove(plan: Path) -> None:
    """Remove a plan's folder, its summary first: without that it is no plan."""
    if plan.is_dir():
        with naming(plan, "removed"):
            (plan / "plan.json").unlink(missing_ok=True)
            shutil.rmtree(plan)
