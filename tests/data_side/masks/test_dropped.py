"""What a template does not render rejects the row, or is counted where it is kept."""

from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.data import Reject, RejectGate, RejectLimitError
from support.rows import reject_of, sample_of, supervised_texts, turns
from support.templates import CHATML, MARKED, REWRITING, TOOLS, byte_tokenizer

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
def test_a_part_that_leaves_no_trace_is_a_reject_and_a_warning_where_it_is_kept(
    tmp_path: Path, row: dict[str, Any], code: str, loss_on: str
) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    assert reject_of(tmp_path, tokenizer, row, loss_on=loss_on).code == code
    assert sample_of(tmp_path, tokenizer, row, loss_on=loss_on, on_dropped="keep").warnings == (code,)
    assert reject_of(tmp_path, tokenizer, row, loss_on=loss_on, on_dropped="keep", strict=True).code == code


@pytest.mark.parametrize(
    ("row", "template"),
    [(WITH_CALL, TOOLS), (WITH_TOOLS, TOOLS), (WITH_REASONING, REWRITING)],
    ids=["calls", "tools", "reasoning"],
)
def test_a_part_that_is_rendered_is_no_warning(tmp_path: Path, row: dict[str, Any], template: str) -> None:
    assert sample_of(tmp_path, byte_tokenizer(tmp_path / "t", template), row, strict=True).warnings == ()


def test_reasoning_that_only_the_last_turn_shows_is_counted_and_no_reject(tmp_path: Path) -> None:
    messages = [*WITH_REASONING["messages"], *turns("b"), {"role": "assistant", "content": "zu", "reasoning": "so"}]
    sample = sample_of(tmp_path, byte_tokenizer(tmp_path / "t", REWRITING), {"messages": messages})
    assert sample.warnings == ("earlier_reasoning_dropped",)


def test_a_part_without_which_the_template_fails_is_rendered(tmp_path: Path) -> None:
    template = CHATML + "{{ '' if messages[1].tool_calls else raise_exception('no call') }}"
    assert sample_of(tmp_path, byte_tokenizer(tmp_path / "t", template), WITH_CALL).warnings == ()


def test_a_message_that_is_not_rendered_is_a_reject_and_counted_where_it_is_kept(tmp_path: Path) -> None:
    template = CHATML.replace("in messages %}", "in messages if message.role != 'system' %}")
    row = {"messages": [{"role": "system", "content": "Be brief."}, *turns("a", "yo")]}
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    assert reject_of(tmp_path, tokenizer, row).code == "message_dropped"
    assert sample_of(tmp_path, tokenizer, row, on_dropped="keep").warnings == ("message_dropped",)
    assert reject_of(tmp_path, tokenizer, row, on_dropped="keep", strict=True).code == "message_dropped"


def test_a_turn_whose_words_are_all_dropped_is_never_supervised(tmp_path: Path) -> None:
    call_alone = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    row = {
        "messages": [*turns("a"), call_alone, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "yo"}]
    }
    for template, tokens in ((CHATML, "a"), (MARKED, "b")):
        tokenizer = byte_tokenizer(tmp_path / tokens, template)
        sample = sample_of(tmp_path, tokenizer, row, on_dropped="keep")
        assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]
        assert sample.warnings == ("empty_turn", "tool_calls_dropped")
    alone = {"messages": [*turns("a"), call_alone]}
    assert reject_of(tmp_path, str(tmp_path / "a"), alone, on_dropped="keep").code == "unsupervised"


def test_a_call_that_is_rendered_without_content_is_supervised(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", TOOLS)
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, row)) == [
        "<tool_call>\nlook {}\n</tool_call><|im_end|>"
    ]


def test_a_dropped_part_ends_the_run_on_request() -> None:
    gate = RejectGate(raise_on_dropped=True)
    gate.feed(Reject.of("rows.jsonl", 2, None, "no JSON", "bad_json"))
    with pytest.raises(RejectLimitError, match=r"rows\.jsonl, line 3: calls are dropped \(--on-dropped raise"):
        gate.feed(Reject.of("rows.jsonl", 3, None, "calls are dropped", "tool_calls_dropped"))


def test_null_and_empty_parts_are_absent(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "yo", "tool_calls": None, "reasoning": None}
    row = {"messages": [*turns("a"), message], "tools": []}
    assert sample_of(tmp_path, byte_tokenizer(tmp_path / "t", CHATML), row, strict=True).warnings == ()
