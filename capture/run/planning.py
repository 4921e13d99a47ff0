"""The plan of a run: made by tokenizing its data once, or taken up again from the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.errors import RunError
from ..data import Item, RecordEncoder, RejectLimitError, Sample, TokeniseOptions, source_identity, tokenise
from ..data.records.answers import answered_items
from ..identity import identity_differences, require_none
from ..progress import Done, Progress, Work
from ..rejects import Reject
from ..store import OutputFolder, Plan, PlanExtra, PlanWriter, differences
from .planned_images import processor_hash
from .settings import CaptureSettings

_TELL_EVERY = 64


def require_same_identity(plan: Plan, identity: dict[str, Any], folder: OutputFolder) -> None:
    """Raise UsageError listing what differs between the run that filled `folder` and this one."""
    require_none(identity_differences(plan.identity, identity), folder.path)


def require_agreement(plan: Plan, known: Mapping[str, Any], folder: OutputFolder) -> None:
    """Raise UsageError as `require_same_identity` does, where so far only the values of `known` are known of this run."""
    require_none(differences(_among(plan.identity, known), known), folder.path)


def _among(there: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `there` whose keys `known` has, nested ones too; an absent value is None."""
    return {
        key: _among(there.get(key) or {}, value) if isinstance(value, Mapping) else there.get(key)
        for key, value in known.items()
    }


def make_plan(
    settings: CaptureSettings,
    folder: OutputFolder,
    place: Path,
    encoder: RecordEncoder,
    identity: dict[str, Any],
    weight_sums: Callable[[], dict[str, str]],
    progress: Progress,
    check_stop: Callable[[], None],
    notes: Sequence[str] = (),
) -> Plan:
    """Tokenize every input row into the plan's files in `place`: each row ends as a sample or as a reject with its reason.

    weight_sums: what the plan keeps of the weights, so that a later run or a repair knows them again.

    Raises:
        RunError: a damaged source. RejectLimitError: more rejects than the run allows; rejects.jsonl has them.
        UsageError: options that do not fit the tokenizer.
    """
    counted = _Counts()
    with PlanWriter(place) as writer:
        if settings.answers is not None:
            items = answered_items(settings.answers)
        else:
            items = tokenise(settings.data, encoder, workers=settings.text.workers, limit=settings.text.limit)
        try:
            _write_items(writer, with_progress(items, progress), settings, counted, check_stop)
        except RejectLimitError:
            # Whoever wants to know why finds each reject up to here.
            if place == folder.plan:  # a plan that is made again leaves the rejects of the first as they are
                folder.write_rejects(writer.rejects())
            raise
        _require_unchanged(settings.data, identity)
        extra = counted.extra(encoder.options, notes, weight_sums())
        return writer.seal(identity, settings.data, shard_rows=settings.shard_rows, extra=extra)


def _write_items(
    writer: PlanWriter,
    items: Iterable[Item],
    settings: CaptureSettings,
    counted: _Counts,
    check_stop: Callable[[], None],
) -> None:
    """Write every sample and reject; raise RejectLimitError where the rejects are too many."""
    gate = settings.text.gate()
    sources = {source: index for index, source in enumerate(settings.data)}
    for item in items:
        check_stop()
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
            writer.reject(item)
        gate.feed(item)
    gate.finish()


def _require_unchanged(sources: Sequence[str], identity: dict[str, Any]) -> None:
    if [source_identity(source) for source in sources] != identity["data"]:
        raise RunError(f"the data changed while it was read ({', '.join(sources)}); run again once it stands still.")


class _Counts:
    """Counts over the samples of a plan, for the summary and the headers."""

    def __init__(self) -> None:
        self.warnings: Counter[str] = Counter()
        self.first_warning: dict[str, str] = {}
        self.unread: Counter[str] = Counter()
        self.mask_rules: Counter[str] = Counter()
        self.truncated = self.images = 0
        self.supervised = 0

    def add(self, sample: Sample) -> None:
        self.warnings.update(sample.warnings)
        for code in sample.warnings:
            self.first_warning.setdefault(code, f"{sample.source}:{sample.line}")
        self.unread.update(sample.fields.unread)
        self.mask_rules[sample.mask_rule] += 1
        self.truncated += sample.truncated_from is not None
        self.supervised += sample.supervised
        self.images += 0 if sample.images is None else len(sample.images.files)

    def extra(self, options: TokeniseOptions, notes: Sequence[str], weights_crc32: Mapping[str, str]) -> PlanExtra:
        return PlanExtra(
            warnings=dict(sorted(self.warnings.items())),
            first_warning=self.first_warning,
            unread_fields=dict(sorted(self.unread.items())),
            mask_rules=dict(sorted(self.mask_rules.items())),
            truncated=self.truncated,
            supervised_tokens=self.supervised,
            template_date=options.date.isoformat(),
            notes=tuple(notes),
            weights_crc32=weights_crc32,
            images=self.images or None,
            image_processor_sha256=processor_hash(options) if self.images else None,
        )


def with_progress(items: Iterable[Item], progress: Progress) -> Iterator[Item]:
    """Pass `items` on and report progress for several at a time: one message per record would flood a run on Ray."""
    progress.started(Work("tokenizing", unit="rows"))
    rows = rejected = 0
    for item in items:
        rows, rejected = rows + 1, rejected + isinstance(item, Reject)
        if rows == _TELL_EVERY:
            progress.advanced(Done(rows, rejected=rejected))
            rows = rejected = 0
        yield item
    progress.advanced(Done(rows, rejected=rejected))
