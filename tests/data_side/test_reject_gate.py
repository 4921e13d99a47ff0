"""How many rows may be rejected before the run ends."""

import numpy as np
import pytest

from hiddentap.capture.data import Reject, RejectGate, RejectLimitError, Sample
from hiddentap.models.errors import RunError

GOOD = Sample("a", "rows.jsonl", 1, np.array([1], np.int32), np.array([1], np.uint8), "substitution")


def bad(code: str, line: int = 9) -> Reject:
    return Reject.of("rows.jsonl", line, None, f"reason of {code}", code)


def feed(gate: RejectGate, *items: Sample | Reject) -> None:
    for item in items:
        gate.feed(item)


def test_a_tenth_is_let_by_and_more_is_not() -> None:
    gate = RejectGate()
    feed(gate, *[GOOD] * 180, *[bad("unsupervised")] * 20)
    gate.finish()
    with pytest.raises(RejectLimitError, match="found 21 of 201: 21 unsupervised"):
        gate.feed(bad("unsupervised"))


def test_nothing_is_decided_on_the_way_before_200_rows() -> None:
    gate = RejectGate()
    feed(gate, *[bad("unsupervised")] * 199)
    with pytest.raises(RejectLimitError, match="found 200 of 200"):
        gate.feed(bad("unsupervised"))


def test_every_reason_counts() -> None:
    gate = RejectGate()
    feed(gate, *[GOOD] * 20, bad("bad_json"), bad("too_long"), bad("no_known_field"))
    with pytest.raises(RunError, match="found 3 of 23: 1 bad_json"):
        gate.finish()


def test_a_run_of_a_few_rows_is_not_judged_by_its_share() -> None:
    gate = RejectGate()
    feed(gate, *[bad("bad_json")] * 19)
    gate.finish()
    gate.feed(GOOD)
    with pytest.raises(RejectLimitError, match="found 19 of 20"):
        gate.finish()


def test_the_error_shows_the_first_reason_of_each_code_and_what_to_do() -> None:
    gate = RejectGate(0.05)
    feed(gate, *[GOOD] * 17, bad("marks_misplaced", 18), bad("turn_not_found", 19), bad("turn_not_found", 20))
    with pytest.raises(RejectLimitError) as error:
        gate.finish()
    assert str(error.value) == (
        "expected at most 5 % of the rows to be rejected; found 3 of 20: 2 turn_not_found, first at rows.jsonl:19: reason of "
        "turn_not_found; 1 marks_misplaced, first at rows.jsonl:18: reason of marks_misplaced. Mend the rows, give a template "
        "with generation marks, supervise everything (--loss-on all), or allow more rejects (--max-reject-rate)"
    )


def test_rejects_of_single_rows_point_to_no_template() -> None:
    gate = RejectGate(0)
    feed(gate, *[GOOD] * 19, bad("bad_json", 20))
    with pytest.raises(RejectLimitError, match=r"Mend the rows, or allow more rejects \(--max-reject-rate\)"):
        gate.finish()


def test_all_rejects_can_be_allowed() -> None:
    gate = RejectGate(1)
    feed(gate, *[bad("unsupervised")] * 300)
    gate.finish()


def test_a_template_that_does_not_end_ends_the_run_at_its_third_row() -> None:
    gate = RejectGate(1)
    feed(gate, bad("too_slow"), bad("too_slow"))
    with pytest.raises(RejectLimitError, match="3 rows took that long"):
        gate.feed(bad("too_slow"))


def test_an_empty_run_passes() -> None:
    RejectGate().finish()
