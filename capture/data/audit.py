"""What a run would make of its input, counted."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...models.errors import RunError
from .items import Item, Reject, Sample
from .reject_gate import RejectGate

PERCENTILES = (0, 10, 50, 90, 99, 100)


@dataclass(frozen=True)
class Audit:
    """Counts over items; the captured and the rejected ones add up to `rows`.

    `rejected`: code to count, commonest first; `first_reject`: the first reject of each code. `unsupervised`: rejects
    for want of a supervised token, a part of `rejected`. `warnings`, `mask_rules`: code to count of samples.
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
    mask_rules: Mapping[str, int]
    tokens: int
    supervised_tokens: int
    length_percentiles: Mapping[int, int]
    ending: str = ""


def audit(items: Iterable[Item], gate: RejectGate | None = None) -> Audit:
    """The audit of a run's items; only the lengths of samples are kept on the way.

    gate: what would end the run, by default at more than 5 % of rows that the mask rules reject.
    """
    gate, ending = gate or RejectGate(), ""
    lengths = array("q")
    rejected: Counter[str] = Counter()
    warnings: Counter[str] = Counter()
    rules: Counter[str] = Counter()
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
        rules[item.mask_rule] += 1
    return Audit(
        rows=len(lengths) + rejected.total(),
        captured=len(lengths),
        rejected=dict(rejected.most_common()),
        first_reject=first,
        truncated=truncated,
        unsupervised=rejected["unsupervised"] + rejected["unsupervised_after_truncation"],
        warnings=dict(warnings.most_common()),
        mask_rules=dict(rules.most_common()),
        tokens=sum(lengths),
        supervised_tokens=supervised,
        length_percentiles=_percentiles(lengths),
        ending=ending or _refusal(gate.finish),
    )


def _refusal(step: Callable[[], None]) -> str:
    try:
        step()
    except RunError as error:
        return str(error)
    return ""


def marked_text(tokenizer: Any, sample: Sample) -> list[tuple[str, bool]]:
    """The sample's text cut where the loss mask changes: (text, supervised) in order, joined equal to the whole text.

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
