"""What a template does not render is counted, or rejects the row when strict."""

from pathlib import Path
from typing import Any

import pytest

from support.rows import reject_of, sample_of, turns
from support.templates import CHATML, REWRITING, TOOLS, byte_tokenizer

CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
WITH_CALL = {"messages": [*turns("a"), {"role": "assistant", "content": "wait", "tool_calls": [CALL]}]}
WITH_TOOLS = {"messages": turns("a", "yo"), "tools": [{"name": "look"}]}
WITH_REASONING = {"messages": [*turns("a"), {"role": "assistant", "content": "yo", "reasoning_content": "hm"}]}


@pytest.mark.parametrize(
    ("row", "code"),
    [(WITH_CALL, "tool_calls_dropped"), (WITH_TOOLS, "tools_dropped"), (WITH_REASONING, "reasoning_dropped")],
    ids=["calls", "tools", "reasoning"],
)
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_part_that_leaves_no_trace_is_a_warning_and_strictly_a_reject(
    tmp_path: Path, row: dict[str, Any], code: str, loss_on: str
) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    assert sample_of(tmp_path, tokenizer, row, loss_on=loss_on).warnings == (code,)
    assert reject_of(tmp_path, tokenizer, row, loss_on=loss_on, strict=True).code == code


@pytest.mark.parametrize(
    ("row", "template"),
    [(WITH_CALL, TOOLS), (WITH_TOOLS, TOOLS), (WITH_REASONING, REWRITING)],
    ids=["calls", "tools", "reasoning"],
)
def test_a_part_that_is_rendered_is_no_warning(tmp_path: Path, row: dict[str, Any], template: str) -> None:
    assert sample_of(tmp_path, byte_tokenizer(tmp_path / "t", template), row, strict=True).warnings == ()


def test_reasoning_that_only_the_last_turn_shows_is_counted(tmp_path: Path) -> None:
    messages = [*WITH_REASONING["messages"], *turns("b"), {"role": "assistant", "content": "zu", "reasoning": "so"}]
    sample = sample_of(tmp_path, byte_tokenizer(tmp_path / "t", REWRITING), {"messages": messages})
    assert sample.warnings == ("reasoning_dropped",)


def test_a_part_without_which_the_template_fails_is_rendered(tmp_path: Path) -> None:
    template = CHATML + "{{ '' if messages[1].tool_calls else raise_exception('no call') }}"
    assert sample_of(tmp_path, byte_tokenizer(tmp_path / "t", template), WITH_CALL).warnings == ()


def test_a_message_that_is_not_rendered_is_counted(tmp_path: Path) -> None:
    template = CHATML.replace("in messages %}", "in messages if message.role != 'system' %}")
    row = {"messages": [{"role": "system", "content": "Be brief."}, *turns("a", "yo")]}
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    assert sample_of(tmp_path, tokenizer, row).warnings == ("message_dropped",)
    assert reject_of(tmp_path, tokenizer, row, strict=True).code == "message_dropped"


def test_null_and_empty_parts_are_absent(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "yo", "tool_calls": None, "reasoning": None}
    row = {"messages": [*turns("a"), message], "tools": []}
    assert sample_of(tmp_path, byte_tokenizer(tmp_path / "t", CHATML), row, strict=True).warnings == ()
