"""Rows as prompts: read in every form of a capture, encoded as a capture encodes whole conversations."""

from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.data import RecordEncoder, TokeniseOptions, encoder
from hiddentap.capture.data.records.items import RawRecord
from hiddentap.capture.sampling.dataset_prompts import DatasetPrompts, dataset_prompts
from hiddentap.capture.sampling.generation.prompts import PromptMaker
from support.rows import sample_of, turns
from support.templates import CHATML, byte_tokenizer

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "yo"}
# The three special tokens are 0 to 2, a printable ASCII byte b is b - 30, a newline 201: user: a, and the answer's header.
PROMPT = (0, 87, 85, 71, 84, 201, 67, 1, 201, 0, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201)


def prompts_of_rows(tokenizer: str, *rows: dict[str, Any]) -> DatasetPrompts:
    maker = PromptMaker(RecordEncoder(TokeniseOptions(tokenizer=tokenizer, template_date="2024-02-03")))
    return dataset_prompts([RawRecord("d", line, row) for line, row in enumerate(rows, 1)], maker, lambda _: None)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"prompt": [ASKED]},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"instruction": "a", "output": "yo"},
        {"instruction": "a"},
        {"custom_id": "c", "body": {"messages": [ASKED]}},
        {"prompt": [ASKED], "chosen": "b", "rejected": "c"},
        {"input_ids": [2, *PROMPT], "attention_mask": [0, *[1] * 20]},
    ],
    ids=lambda row: "+".join(row),
)
def test_a_row_of_any_form_is_the_same_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    found = prompts_of_rows(byte_tokenizer(tmp_path / "t"), row)
    assert [one.token_ids for one in found.prompts] == [PROMPT]
    assert found.rejects == []


def test_a_prompt_begins_the_conversation_that_a_capture_encodes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", "{{ mood or '' }}" + CHATML)
    row = {"messages": turns("é", "b", "c", "d"), "system": "S", "chat_template_kwargs": {"mood": "m"}}
    (prompt,) = prompts_of_rows(tokenizer, row).prompts
    whole = sample_of(tmp_path, tokenizer, row).input_ids.tolist()
    assert list(prompt.token_ids) == whole[: len(prompt.token_ids)]
    assert whole[len(prompt.token_ids) :] == [70, 1, 201]


def test_a_text_prompt_leaves_its_completion_out(tmp_path: Path) -> None:
    found = prompts_of_rows(
        byte_tokenizer(tmp_path / "t"), {"prompt": "ab", "completion": "yo", "topic": 1}, {"text": "ab"}
    )
    assert [one.token_ids for one in found.prompts] == [(67, 68), (67, 68)]
    assert found.unread == {"topic": 1}


def test_what_a_prompt_cannot_hold_is_a_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "RECORD_SECONDS", 1.0)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path / "t", "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}" + CHATML)
    found = prompts_of_rows(tokenizer, {"messages": [ASKED], "images": ["a.png"]}, {"messages": turns("loop")})
    assert [(one.line, one.code) for one in found.rejects] == [(1, "unread_field"), (2, "too_slow")]
