"""The check of a folder from end to end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...models.errors import UsageError
from ...models.loading import ModelSource
from ..progress import Progress, Silent
from ..store import Finding, OutputFolder, Shard
from .beside_model import beside_model
from .files import check_following, check_headers, check_structure, check_values
from .repair import repair as repair_folder
from .repair import require_repairable
from .report import Report


def verify(
    out: str | Path,
    *,
    model: str | Path | ModelSource | None = None,
    samples: int = 8,
    repair: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check an output folder: files, checksums, tokens, values; and `samples` of its samples beside plain forwards.

    Args:
        model: what to compare with; None takes the one that the headers name, where it is on this machine and has the same
            config and weights; ``"none"`` compares with no model.
        samples: how many are compared, spread over all shards; 0 compares none and loads no model.
        repair: remove shards with errors, so that the capture that made the folder makes them again. One sample of every
            shard at least is compared then. Errors found beside a model that is not the captured one remove nothing.

    Raises:
        UsageError: no folder of captured shards, a model that cannot be loaded, or a repair without a plan.
        FolderLockedError: a repair while a run writes to the folder.
    """
    folder, progress = OutputFolder(Path(out)), progress or Silent()
    _require_usable(folder, samples, repair)
    structure = check_structure(folder, progress)
    shards = folder.sealed_shards().shards
    structure += [*check_headers(folder, shards), *check_following(shards.values())]
    values = check_values(shards.values(), progress)
    beside = beside_model(folder, shards.values(), model, samples, progress, each_shard=repair)
    findings = [*structure, *values, *beside.findings]
    certain = [*structure, *_not_kept(values, shards.values()), *(beside.findings if beside.same_model else [])]
    return Report(
        path=folder.path,
        findings=tuple(findings),
        shards=len(shards),
        samples=sum(shard.M for shard in shards.values()),
        rows=sum(shard.R for shard in shards.values()),
        compared=beside.compared,
        reference=beside.reference,
        agreement=beside.agreement,
        notes=beside.notes,
        repaired=repair_folder(folder, certain) if repair else (),
    )


def _require_usable(folder: OutputFolder, samples: int, repair: bool) -> None:
    if samples < 0:
        raise UsageError(f"samples must be at least 0; got {samples}.")
    if not folder.shards.is_dir():
        raise UsageError(f"{folder.path} holds no captured shards; expected the folder that a capture filled.")
    if repair:
        require_repairable(folder)


def _not_kept(values: Iterable[Finding], shards: Iterable[Shard]) -> list[Finding]:
    """Without those of runs that were told to keep such rows: the same run would make them again."""
    kept = {str(shard.path) for shard in shards if shard.metadata.get("on_bad_values") == "keep"}
    return [finding for finding in values if finding.path not in kept]
