"""The check of a folder from end to end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...models.checkpoint import changed_weights
from ...models.errors import UsageError
from ...models.model_source import ModelSource
from ..progress import Progress, Silent
from ..store import Finding, OutputFolder, Plan, PlanError, Shard
from ..weights_read import checked_weight_sums
from .beside_model import BesideModel, beside_model
from .files import check_following, check_headers, check_structure, check_values
from .reference_model import NO_MODEL
from .repair import Repaired, require_repairable
from .repair import repair as repair_folder
from .report import Report


def verify(
    out: str | Path,
    *,
    model: str | Path | ModelSource | None = None,
    samples: int = 8,
    repair: bool = False,
    require_model: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check an output folder: files, checksums, tokens, values; compare `samples` of its samples with plain forwards.

    Args:
        out: the folder.
        model: what to compare with; None takes the model that the headers name, where it is on this machine and has the same
            config and weights; ``"none"`` compares with no model.
        samples: how many are compared, spread over all shards; 0 compares none and loads no model.
        repair: remove shards with errors, so that the same capture command captures them again. Compares at least one sample of
            every shard then. Errors against a model that is not the captured one remove nothing.
        require_model: report an error where no sample could be compared with a model, instead of a note.
        trust_remote_code: let code that comes with the model run; a `ModelSource` has a field of its own for it.
        progress: receives reports; None logs notes to ``hiddentap`` at level INFO.

    Raises:
        UsageError: no folder of captured shards, a model that cannot be loaded, or a repair without a plan.
        FolderLockedError: a repair while a run writes to the folder.

    Example:
        >>> report = verify("OUT", samples=2)
        >>> report.compared, [agreement.bit_equal == agreement.rows for agreement in report.agreement]
        (2, [True, True, True, True])
    """
    folder, progress = OutputFolder(Path(out)), progress or Silent()
    if require_model and (samples == 0 or model == NO_MODEL):
        raise UsageError(
            "require_model asks for a comparison with a model, and samples=0 or model='none' for none; drop one."
        )
    _require_usable(folder, samples, repair)
    structure = check_structure(folder, progress)
    shards = folder.sealed_shards().shards
    structure += [*check_headers(folder, shards), *check_following(shards.values())]
    values = check_values(shards.values(), progress)
    beside = beside_model(
        folder, shards.values(), model, samples, progress, each_shard=repair, trust_remote_code=trust_remote_code
    )
    doubt, changed = _weights(folder, beside, progress)
    findings = [*structure, *values, *beside.findings, *changed]
    if require_model and not beside.compared:
        why = "; ".join(beside.notes) or "no sample was compared with a model"
        findings.append(Finding(str(folder.path), None, None, why, "error"))
    certain = [*structure, *_not_kept(values, shards.values()), *(beside.findings if beside.same_model else [])]
    repaired = repair_folder(folder, certain, doubt) if repair else Repaired()
    return Report(
        path=folder.path,
        findings=tuple(findings),
        shards=len(shards),
        samples=sum(shard.M for shard in shards.values()),
        rows=sum(shard.R for shard in shards.values()),
        compared=beside.compared,
        reference=beside.reference,
        agreement=beside.agreement,
        notes=(*beside.notes, *repaired.kept),
        repaired=repaired.removed,
    )


def _weights(folder: OutputFolder, beside: BesideModel, progress: Progress) -> tuple[str | None, list[Finding]]:
    """Return why the model alone does not condemn a shard whose checksums hold (None if it does), and findings on the weights.

    The samples of tensors that say whether it is the same model leave out most bytes; here every byte is read.
    """
    alone = "its own checksums hold, and the model alone speaks against it"
    if beside.weights is None or not beside.same_model:
        return f"{alone}, or what stands for it", []
    try:
        stated = Plan(folder.plan).extra.weights_crc32
    except PlanError:
        stated = None
    if stated is None:
        return f"{alone}; the capture kept no checksum of all the weights", []
    changed = changed_weights(stated, checked_weight_sums(beside.weights, progress))
    if not changed:
        return None, []
    what = f"the weights changed since the capture: {'; '.join(changed)}. Fetch the model again"
    return f"{alone}, whose weights changed since", [Finding(str(beside.weights), None, None, what, "error", "model")]


def _require_usable(folder: OutputFolder, samples: int, repair: bool) -> None:
    if samples < 0:
        raise UsageError(f"samples must be at least 0; got {samples}.")
    folder.require_capture()
    if repair:
        require_repairable(folder)


def _not_kept(values: Iterable[Finding], shards: Iterable[Shard]) -> list[Finding]:
    """Drop findings in shards of runs that keep such rows: the same run would make them again."""
    kept = {str(shard.path) for shard in shards if shard.description.on_bad_values == "keep"}
    return [finding for finding in values if finding.path not in kept]
