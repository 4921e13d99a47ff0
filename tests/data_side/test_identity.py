"""The identity of a tokenisation changes with what changes samples, and with nothing else."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.data import RecordEncoder, TokenisationIdentity, TokeniseOptions, identity_of
from support.templates import CHATML, CLOCK, MARKED, byte_tokenizer


def identity(folder: Path, template: str | None = CHATML, special: tuple[str, ...] | None = None, **options: Any):
    tokenizer = byte_tokenizer(folder, template, *([special] if special else []))
    return identity_of(RecordEncoder(TokeniseOptions(tokenizer=tokenizer, **{"template_date": "2024-02-03"} | options)))


def test_an_identity_is_plain_json_with_the_templates_hash(tmp_path: Path) -> None:
    found = identity(tmp_path / "t", template_args={"b": 1, "a": False}).as_dict()

    assert json.loads(json.dumps(found)) == found
    assert len(found.pop("tokenizer_sha256")) == 64
    assert found == {
        "template_sha256": hashlib.sha256(CHATML.encode()).hexdigest(),
        "template_args": '{"a":false,"b":1}',
        "template_date": None,
        "mask_rule": "substitution",
        "loss_on": "assistant",
        "on_dropped": "reject",
        "think": "keep",
        "ids_format": "plain",
        "max_length": 4096,
        "on_too_long": "truncate",
        "strict": False,
    }


def test_the_same_tokenizer_elsewhere_is_the_same(tmp_path: Path) -> None:
    assert identity(tmp_path / "a") == identity(tmp_path / "b")


def test_tokenising_does_not_change_the_identity(tmp_path: Path) -> None:
    tokeniser = RecordEncoder(TokeniseOptions(tokenizer=byte_tokenizer(tmp_path / "t"), template_date="2024-02-03"))
    before = identity_of(tokeniser)
    tokeniser.template.encode("hi", [{"role": "user", "content": "hi"}])
    assert identity_of(tokeniser) == before


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"special": ("<|im_start|>", "<|im_end|>", "<s>")}, "tokenizer_sha256"),
        ({"template": CHATML + " "}, "template_sha256"),
        ({"chat_template": CHATML + " "}, "template_sha256"),
        ({"template_args": {"enable_thinking": False}}, "template_args"),
        ({"loss_on": "all"}, "loss_on"),
        ({"think": "mask"}, "think"),
        ({"on_dropped": "keep"}, "on_dropped"),
        ({"loss_on": "last"}, "loss_on"),
        ({"max_length": 9}, "max_length"),
        ({"on_too_long": "drop"}, "on_too_long"),
        ({"strict": True}, "strict"),
        ({"template": MARKED}, "mask_rule"),
    ],
)
def test_whatever_changes_samples_changes_the_identity(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    plain, other = identity(tmp_path / "a").as_dict(), identity(tmp_path / "b", **changed).as_dict()
    assert plain[field] != other[field]


def test_the_date_counts_only_where_the_template_asks_for_it(tmp_path: Path) -> None:
    dates = ("2024-02-03", "2025-01-01")
    one, other = (identity(tmp_path / date, CLOCK, template_date=date).template_date for date in dates)
    assert (one, other) == dates
    assert identity(tmp_path / "a") == identity(tmp_path / "b", template_date="2025-01-01")


def test_a_tokenizer_without_template_has_an_identity(tmp_path: Path) -> None:
    found = identity(tmp_path / "t", None)
    assert isinstance(found, TokenisationIdentity)
    assert (found.template_sha256, found.mask_rule) == (None, None)
