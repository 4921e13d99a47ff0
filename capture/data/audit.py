"""Counts of what a run would make of its input."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...models.errors import RunError
from ..rejects import Reject
from .errors import MEMORY_CODE, TIMEOUT_CODE
from .masks.unrendered import DROPPED_CODES
from .records.items import Item, Sample

# Rejects that one template causes on many records; its own marks, or no rule at all, take them.
_MASK_CODES = frozenset(
    {"marker_not_unique", "turn_not_found", "marks_misplaced", "content_changed", "thinking_not_tagged"}
)
# Shares of fewer records say nothing: such a run shows each of its rejects.
_FEWEST_JUDGED = 20
_FIRST_CHECK = 200
# A template that does not end would cost its time limit on every record.
_MOST_TIMEOUTS = 3
MAX_REJECT_RATE = 0.1


class RejectLimitError(RunError):
    """More records were rejected than the run allows."""


class RejectGate:
    """Count items and raise RejectLimitError once too many are rejected, whatever the reasons.

    max_rate: the share of records that may be rejected, 0 to 1. Shares are judged from 200 records on and, in `finish`, from 20.
    strict: the first reject ends the run. raise_on_dropped: the first record with a part that the template drops does.
    """

    def __init__(
        self, max_rate: float = MAX_REJECT_RATE, *, strict: bool = False, raise_on_dropped: bool = False
    ) -> None:
        self._max_rate = max_rate
        self._strict = strict
        self._raise_on_dropped = raise_on_dropped
        self._records = 0
        self._rejects: Counter[str] = Counter()
        self._first: dict[str, Reject] = {}

    def feed(self, item: Item) -> None:
        """Count one item; raise RejectLimitError where it ends the run."""
        self._records += 1
        if not isinstance(item, Reject):
            return
        if self._strict:
            raise _ended_by(item, "strict: the first rejected row ends the run")
        if self._raise_on_dropped and item.code in DROPPED_CODES:
            raise _ended_by(item, "--on-dropped raise: the first one ends the run")
        self._rejects[item.code] += 1
        self._first.setdefault(item.code, item)
        for code, much in ((TIMEOUT_CODE, "long"), (MEMORY_CODE, "much memory")):
            if self._rejects[code] >= _MOST_TIMEOUTS:
                raise _ended_by(item, f"{_MOST_TIMEOUTS} rows took that {much}, so the run ends")
        if self._records >= _FIRST_CHECK:
            self._check()

    def finish(self) -> None:
        """Judge the whole input; raise RejectLimitError where too much of it was rejected."""
        if self._records >= _FEWEST_JUDGED:
            self._check()

    def _check(self) -> None:
        rejected = self._rejects.total()
        # A tolerance: 0.1 of a count is not always a float.
        if rejected <= self._max_rate * self._records + 1e-9:
            return
        ranked = self._rejects.most_common()
        told = "; ".join(f"{count} {code}, first at {_place_and_reason(self._first[code])}" for code, count in ranked)
        template = "give a template with generation marks, supervise everything (--loss-on all), "
        raise RejectLimitError(
            f"expected at most {100 * self._max_rate:g} % of the rows to be rejected; found {rejected} of {self._records}: "
            f"{told}. Mend the rows, {template if ranked[0][0] in _MASK_CODES else ''}or allow more rejects "
            f"(--max-reject-rate)"
        )


def _ended_by(reject: Reject, why: str) -> RejectLimitError:
    return RejectLimitError(f"{reject.source}, line {reject.line}: {reject.reason} ({why})")


def _place_and_reason(reject: Reject) -> str:
    return f"{reject.source}:{reject.line}: {reject.reason}"


PERCENTILES = (0, 10, 50, 90, 99, 100)


@dataclass(frozen=True)
class Audit:
    """Counts over items; the captured and the rejected ones add up to `rows`.

    `rejected`: code to count, commonest first; `first_reject`: the first reject of each code. `unsupervised`: rejects
    for want of a supervised token, a part of `rejected`. `warnings`, `mask_rules`: code to count of samples.
    `first_warning`: where the first sample with each warning is, as source:line. `fields_read`, `fields_unread`: names of the
    records' fields to count of samples: those that a reader consumed, and those that nothing read.
    `length_percentiles`: percentile to tokens of a sample, after truncation; empty without samples.
    `ending`: why a run would end with an error over these rows; empty where it would not.
    """

    rows: int
    captured: int
    rejected: Mapping[str, int]
    first_reject: Mapping[str, Reject]
    truncated: int
    unsupervised: int
    warnings: Mapping[str, int]
    first_warning: Mapping[str, str]
    fields_read: Mapping[str, int]
    fields_unread: Mapping[str, int]
    mask_rules: Mapping[str, int]
    tokens: int
    supervised_tokens: int
    length_percentiles: Mapping[int, int]
    ending: str = ""


def audit(items: Iterable[Item], gate: RejectGate | None = None) -> Audit:
    """Return the audit of a run's items; only the lengths of samples are kept on the way.

    gate: what would end the run, by default more than 10 % of rejected records.
    """
    gate, ending = gate or RejectGate(), ""
    lengths = array("q")
    rejected: Counter[str] = Counter()
    warnings: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    read: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    told: dict[str, str] = {}
    first: dict[str, Reject] = {}
    truncated = supervised = 0
    for item in items:
        ending = ending or _refusal(partial(gate.feed, item))
        if isinstance(item, Reject):
            rejected[item.code] += 1
            first.setdefault(item.code, item)
            continue
        lengths.append(len(item.input_ids))
        supervised += item.supervised
        truncated += item.truncated_from is not None
        warnings.update(item.warnings)
        for code in item.warnings:
            told.setdefault(code, f"{item.source}:{item.line}")
        read.update(item.fields.read)
        unread.update(item.fields.unread)
        rules[item.mask_rule] += 1
    return Audit(
        rows=len(lengths) + rejected.total(),
        captured=len(lengths),
        rejected=dict(rejected.most_common()),
        first_reject=first,
        truncated=truncated,
        unsupervised=rejected["unsupervised"] + rejected["unsupervised_after_truncation"],
        warnings=dict(warnings.most_common()),
        first_warning=told,
        fields_read=dict(read.most_common()),
        fields_unread=dict(unread.most_common()),
        mask_rules=dict(rules.most_common()),
        tokens=sum(lengths),
        supervised_tokens=supervised,
        length_percentiles=_percentiles(lengths),
        ending=ending or _refusal(gate.finish),
    )


def _refusal(step: Callable[[], None]) -> str:
    try:
        step()
    except RejectLimitError as error:
        return str(error)
    return ""


def marked_text(tokenizer: Any, sample: Sample) -> list[tuple[str, bool]]:
    """Return the sample's text cut where the loss mask changes: (text, supervised) in order, joined equal to the whole text.

    Pieces are differences of decoded prefixes: a piece decoded alone loses a leading space in some tokenizers. A
    character whose bytes lie on both sides of a cut goes with the later piece.
    """
    whole = _decoded(tokenizer, sample.input_ids)
    cuts = [*(np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist(), len(sample.input_ids)]
    spans, read, at = [], 0, 0
    for cut in cuts:
        end = (
            len(whole) if cut == len(sample.input_ids) else _shared(_decoded(tokenizer, sample.input_ids[:cut]), whole)
        )
        spans.append((whole[read:end], bool(sample.loss_mask[at])))
        read, at = max(read, end), cut
    return spans


def _decoded(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _shared(first: str, second: str) -> int:
    return next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))


def _percentiles(lengths: "array[int]") -> dict[int, int]:
    if not lengths:
        return {}
    values = np.percentile(np.frombuffer(lengths, np.int64), PERCENTILES, method="inverted_cdf")
    return {percentile: int(value) for percentile, value in zip(PERCENTILES, values, strict=True)}
