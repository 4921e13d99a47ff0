"""Thirty draws of the fuzz of the model side, and what it makes of captures that are wrong in known ways.

`python scripts/fuzz_models.py --only SEED:DRAW` runs one of them again, in full.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fuzzing import draws, running, verdicts
from fuzzing.draws import Draw, draw
from fuzzing.verdicts import FINDINGS, Verdict, judge
from fuzzing.ways import WAYS

from hiddentap.models.errors import UsageError

SEED, DRAWS = 1, 30

# Of transformers and peft, which each model type calls in its own way.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def judged() -> dict[str, Verdict]:
    """What came of each draw, by its text."""
    return {str(one): judge(one) for one in (draw(SEED, number) for number in range(DRAWS))}


def test_thirty_random_models_run_in_random_ways_show_plain_rows_or_are_refused(judged: dict[str, Verdict]) -> None:
    assert {text: verdict for text, verdict in judged.items() if verdict.is_finding} == {}


def test_at_least_a_third_of_the_draws_is_compared_row_by_row(judged: dict[str, Verdict]) -> None:
    kinds = [verdict.kind for verdict in judged.values()]
    assert kinds.count("equal") >= DRAWS // 3


def test_a_draw_follows_from_its_seed_and_number_alone() -> None:
    first = draw(SEED, 3)
    assert str(draw(SEED, 3)) == str(first)
    assert dict(draw(SEED, 3).fields) == dict(first.fields)
    assert len({str(draw(SEED, number)) for number in range(DRAWS)}) == DRAWS


@pytest.fixture
def ordinary() -> Draw:
    """A llama under `tap`, two padded samples."""
    return replace(
        draw(SEED, 0), family=draws.FAMILIES["llama"], fields={}, attention="default", dtype=torch.float32, mode="eval",
        way=WAYS["tap right lengths"], wrapper="none", lengths=(5, 3), layer_ids=(0, 2),
    )  # fmt: skip


def test_an_ordinary_model_is_equal(ordinary: Draw) -> None:
    assert judge(ordinary) == Verdict("equal")


def _changed(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    right = running.ENTRIES["tap"]
    monkeypatch.setitem(running.ENTRIES, "tap", lambda draw, samples: change(right(draw, samples)))  # type: ignore[operator]


def _fail(error: Exception) -> object:
    def failing(_: object) -> Iterator[object]:
        raise error

    return failing


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("wrong", lambda shown: [replace(some, rows=some.rows.roll(1, 0)) for some in shown]),
        ("wrong", lambda shown: [replace(some, rows=some.rows.flip(1)) for some in shown]),
        ("wrong", lambda shown: [replace(some, rows=some.rows * (1 + 1e-4)) for some in shown]),
        ("wrong", lambda shown: [replace(some, rows=some.rows[:-1]) for some in shown]),
        ("silent", lambda shown: shown[:1]),
        ("refused", _fail(UsageError("not so"))),
        ("refused", _fail(ExceptionGroup("both", [UsageError("not so")]))),
        ("crashed", _fail(ValueError("of somebody else"))),
    ],
)
def test_a_capture_that_is_wrong_is_found(
    kind: str, change: object, ordinary: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    _changed(monkeypatch, change)
    assert judge(ordinary).kind == kind


def test_a_plain_sample_of_an_ordinary_model_must_not_be_refused(
    ordinary: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    _changed(monkeypatch, _fail(UsageError("not so")))
    verdict = judge(replace(ordinary, way=WAYS["tap alone"]))
    assert verdict.kind == "refused without need"
    assert verdict.is_finding


def test_one_bit_of_a_row_that_must_be_exact_is_found(ordinary: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, lambda shown: [replace(some, rows=some.rows.nextafter(some.rows + 1)) for some in shown])
    assert judge(replace(ordinary, way=WAYS["tap alone"])).kind == "wrong"
    assert judge(ordinary).kind == "equal"


def test_what_the_model_itself_cannot_do_is_no_finding(ordinary: Draw) -> None:
    absolute = replace(ordinary, family=draws.FAMILIES["gpt2"], fields={"n_positions": 4})
    assert judge(absolute).kind == "cannot run"
    assert "cannot run" not in FINDINGS
    assert verdicts.reason("boundary 3 of model.layers.2 gave 7") == "boundary N of LAYER gave N"
