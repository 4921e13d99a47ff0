"""How many rows the mask rules may reject before the run ends."""

import numpy as np
import pytest

from hiddentap.capture.data import Reject, RejectGate, Sample
from hiddentap.models.errors import RunError

GOOD = Sample("a", "rows.jsonl", 1, np.array([1], np.int32), np.array([1], np.uint8), "substitution")


def bad(code: str, line: int = 9) -> Reject:
    return Reject("rows.jsonl", line, None, f"reason of {code}", code)


def feed(gate: RejectGate, *items: Sample | Reject) -> None:
    for item in items:
        gate.feed(item)


def test_five_percent_is_let_by_and_more_is_not() -> None:
    gate = RejectGate()
    feed(gate, *[GOOD] * 190, *[bad("unsupervised")] * 10)
    gate.finish()
    with pytest.raises(RunError, match="found 11 of 201 rejected"):
        gate.feed(bad("unsupervised"))


def test_nothing_is_decided_before_200_rows() -> None:
    gate = RejectGate()
    feed(gate, *[bad("unsupervised")] * 199)
    with pytest.raises(RunError, match="found 200 of 200 rejected"):
        gate.feed(bad("unsupervised"))


def test_a_short_run_is_decided_at_its_end() -> None:
    gate = RejectGate()
    feed(gate, GOOD, bad("turn_not_found", line=2))
    with pytest.raises(RunError, match="found 1 of 2 rejected"):
        gate.finish()


def test_the_error_shows_the_commonest_reason_and_what_to_do() -> None:
    gate = RejectGate()
    feed(gate, bad("marks_misplaced", line=1), bad("turn_not_found", line=2), bad("turn_not_found", line=3))
    with pytest.raises(RunError) as error:
        gate.finish()
    assert str(error.value) == (
        "expected the mask rules to take at least 95 % of the rows; found 3 of 3 rejected, most of them (2) as "
        "turn_not_found, first at rows.jsonl:2: reason of turn_not_found. Give a template with generation marks, "
        "supervise everything (--loss-on all), or let the rows go (--allow-rejects)"
    )


def test_other_rejects_do_not_count() -> None:
    gate = RejectGate()
    feed(gate, *[bad("bad_json")] * 300, *[bad("too_long")] * 300, *[bad("unsupervised_after_truncation")] * 300)
    gate.finish()


def test_rejects_can_be_allowed() -> None:
    gate = RejectGate(allow_rejects=True)
    feed(gate, *[bad("unsupervised")] * 300)
    gate.finish()


def test_an_empty_run_passes() -> None:
    RejectGate().finish()
