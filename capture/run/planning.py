"""The plan of a run: made by tokenising its data once, or taken up again from the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...models.errors import RunError, UsageError
from ..data import Reject as RowReject
from ..data import RejectGate, Sample, TokeniseOptions, source_identity, tokenise
from ..progress import Progress, Work
from ..store import OutputFolder, Plan, PlanWriter, Reject, differences
from .planned_images import processor_of_images
from .settings import CaptureSettings

_TELL_EVERY = 64


def existing_plan(folder: OutputFolder) -> Plan | None:
    """The sealed plan of an earlier run on this folder."""
    return Plan(folder.plan) if (folder.plan / "plan.json").exists() else None


def identity_differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between what `there` says of its run and the identity `now`, a line each.

    Where a model lies is no part of it: its config and its weights are.
    """
    return differences({key: there.get(key) for key in now} | _without_id(there), dict(now) | _without_id(now))


def _without_id(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": {key: value for key, value in (identity.get("model") or {}).items() if key != "id"}}


def require_same_identity(plan: Plan, identity: dict[str, Any], folder: OutputFolder) -> None:
    """Raise UsageError listing what differs between the run that filled `folder` and this one."""
    changed = identity_differences(plan.identity, identity)
    if changed:
        raise UsageError(
            f"{folder.path} holds another run; choose another folder, or ask for the same again. What differs (there -> now):\n  "
            + "\n  ".join(changed)
        )


def make_plan(
    settings: CaptureSettings,
    folder: OutputFolder,
    options: TokeniseOptions,
    identity: dict[str, Any],
    progress: Progress,
    check_stop: Callable[[], None],
) -> Plan:
    """Tokenise every input row into the plan's files: each row ends as a sample or as a reject with its reason.

    Raises:
        RunError: a damaged source, the first reject of a strict run, or a mask rule that fails on too many rows.
        UsageError: options that do not fit the tokenizer.
    """
    gate = RejectGate(settings.text.allow_rejects, strict=settings.text.strict)
    sources = {source: index for index, source in enumerate(settings.data)}
    counted = _Counts()
    with PlanWriter(folder.plan) as writer:
        items = tokenise(settings.data, options, workers=settings.text.workers, limit=settings.text.limit)
        for item in told(items, progress):
            check_stop()
            gate.feed(item)
            if isinstance(item, Sample):
                counted.add(item)
                writer.add(
                    item.input_ids,
                    item.loss_mask,
                    sample_id=item.sample_id,
                    source=sources[item.source],
                    line=item.line,
                    truncated_from=item.truncated_from or 0,
                    images=None if item.images is None else item.images.as_json(),
                )
            else:
                detail = {"code": item.code}
                writer.reject(Reject(item.source, item.line, item.sample_id, item.reason, detail))
        gate.finish()
        _require_unchanged(settings.data, identity)
        extra = counted.as_json(options) | processor_of_images(options, counted.images)
        return writer.seal(identity, settings.data, shard_rows=settings.shard_rows, extra=extra)


def _require_unchanged(sources: Sequence[str], identity: dict[str, Any]) -> None:
    if [source_identity(source) for source in sources] != identity["data"]:
        raise RunError(f"the data changed while it was read ({', '.join(sources)}); run again once it stands still.")


class _Counts:
    """What the samples of a plan have in common, for the summary and the headers."""

    def __init__(self) -> None:
        self.warnings: Counter[str] = Counter()
        self.mask_rules: Counter[str] = Counter()
        self.truncated = self.images = 0
        self.supervised = 0

    def add(self, sample: Sample) -> None:
        self.warnings.update(sample.warnings)
        self.mask_rules[sample.mask_rule] += 1
        self.truncated += sample.truncated_from is not None
        self.supervised += sample.supervised
        self.images += 0 if sample.images is None else len(sample.images.files)

    def as_json(self, options: TokeniseOptions) -> dict[str, Any]:
        return {
            "warnings": dict(sorted(self.warnings.items())),
            "mask_rules": dict(sorted(self.mask_rules.items())),
            "truncated": self.truncated,
            "supervised_tokens": self.supervised,
            "template_date": options.date.isoformat(),
        }


def told(items: Iterable[Sample | RowReject], progress: Progress) -> Iterator[Sample | RowReject]:
    """Pass `items` on, and tell of a few at a time: told of each, a worker on Ray would send a message for every row."""
    progress.started(Work("tokenising", unit="rows"))
    rows = rejected = 0
    for item in items:
        rows, rejected = rows + 1, rejected + isinstance(item, RowReject)
        if rows == _TELL_EVERY:
            progress.advanced(rows, rejected=rejected)
            rows = rejected = 0
        yield item
    progress.advanced(rows, rejected=rejected)
