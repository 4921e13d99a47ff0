"""The end of a run: rejects and manifest written from what the plan and the sealed shards say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...models.errors import RunError
from ..store import Manifest, OutputFolder, Plan, Reject, kept_mass
from .resuming import sealed_shards
from .summary import RunSummary


def _supervised(plan: Plan, reject: Reject) -> int:
    """Tokens of a sample rejected in its forward that the plan counts as supervised; a row rejected before has none."""
    return 0 if reject.sample_index is None else int(plan.loss_mask(reject.sample_index).sum())


@dataclass(frozen=True)
class Effort:
    """Cost of this run's forwards.

    Attributes:
        tokens: rows that were not there before.
        seconds: from the first forward to the last seal.
        shards_before: how many shards an earlier run had sealed.
        batch_tokens: the budget of positions at the end; None where there was none, or several workers each had their own.
    """

    tokens: int
    seconds: float
    shards_before: int
    batch_tokens: int | None


def _first_of_each(rejects: Iterable[Reject]) -> dict[str, str]:
    """Return the place and reason of the first reject of each code."""
    first: dict[str, str] = {}
    for reject in rejects:
        first.setdefault(reject.code, f"{reject.source}:{reject.line}: {reject.reason}")
    return first


def finish(
    plan: Plan,
    folder: OutputFolder,
    effort: Effort,
    hidden_size: int,
    notes: tuple[str, ...],
) -> RunSummary:
    """Sum the run up; replace rejects.jsonl and the manifest.

    `hidden_size`, `notes`: of the model that was captured.

    Raises:
        RunError: shards of the plan are not there, whatever the reason; such a folder is never called complete.
    """
    shards = [shard for _, shard in sorted(sealed_shards(folder, plan).items())]
    if len(shards) != len(plan.shards):
        raise RunError(
            f"{folder.path} has {len(shards)} of the {len(plan.shards)} shards of its plan; run the same command again."
        )
    rejects = [*plan.rejects(), *(reject for shard in shards for reject in shard.rejects)]
    mass = kept_mass(shards)
    summary = RunSummary(
        out=folder.path,
        captured=sum(shard.M for shard in shards),
        rejected=len(rejects),
        rejected_by_code=dict(Counter(reject.code for reject in rejects).most_common()),
        tokens=sum(shard.R for shard in shards),
        supervised_tokens=plan.extra.supervised_tokens - sum(_supervised(plan, reject) for reject in rejects),
        truncated=plan.extra.truncated,
        first_reject=_first_of_each(rejects),
        warnings=dict(plan.extra.warnings),
        first_warning=dict(plan.extra.first_warning),
        unread_fields=dict(plan.extra.unread_fields),
        shards=len(shards),
        shards_done_before=effort.shards_before,
        bytes=sum(shard.nbytes for shard in shards),
        tokens_now=effort.tokens,
        seconds=effort.seconds,
        batch_tokens=effort.batch_tokens,
        layer_ids=tuple(plan.identity["taps"]["layer_ids"]),
        convention=plan.identity["taps"]["convention"],
        hidden_size=hidden_size,
        notes=(*notes, *plan.extra.notes),
        top_logits_share=None if mass is None else mass.mean,
        top_logits_quantiles=None if mass is None else mass.quantiles,
    )
    checksum = folder.write_rejects(rejects)
    Manifest.from_shards(
        plan.identity, plan.summary(), shards, complete=True, counts=summary.counts(), rejects_crc32=checksum
    ).write(folder.manifest_path)
    return summary
