"""Rows that are read, and rows that are rejected by line number with the reason."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hiddentap.capture.data import Sample, audit
from support.rows import reject_of, sample_of, supervised_texts, text_of, tokenise_rows, turns
from support.templates import CHATML, TOOLS, byte_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return byte_tokenizer(tmp_path / "tokenizer", CHATML)


def text(value: str) -> str:
    return json.dumps({"text": value})


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "cut": ('{"text": "a"', "bad_json"),
    "two values": ('{"text": "a"} {"text": "b"}', "bad_json"),
    "a control character": ('{"text": "a\x01"}', "bad_json"),
    "latin-1": (b'{"text": "\xe9"}', "not_utf8"),
    "an encoded surrogate": (b'{"text": "\xed\xa0\x80"}', "not_utf8"),
    "a list": ("[1, 2]", "not_an_object"),
    "a number": ("7", "not_an_object"),
    "NaN": ('{"text": "a", "score": NaN}', "bad_number"),
    "minus infinity": ('{"text": "a", "score": [-Infinity]}', "bad_number"),
    "a float beyond float64": ('{"text": "a", "score": 1e999}', "bad_number"),
    "a key twice": ('{"text": "a", "text": "b"}', "duplicate_key"),
    "a key twice inside": ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "duplicate_key"),
    "10,000 levels": ('{"text": "a", "x": ' + "[" * 10_000 + "]" * 10_000 + "}", "too_deep"),
    "5,000 digits": ('{"text": "a", "x": ' + "1" * 5000 + "}", "number_too_long"),
    "a lone surrogate": ('{"text": "a\\ud800"}', "lone_surrogate"),
    "a lone surrogate in a message": ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "lone_surrogate"),
    "a lone surrogate in the id": ('{"id": "\\ud800", "text": "a"}', "lone_surrogate"),
    "no field": ({"question": "a", "answer": "b"}, "no_known_field"),
    "null fields": ({"messages": None, "text": None}, "no_known_field"),
    "no messages": ({"messages": []}, "empty_conversation"),
    "messages of text": ({"messages": "hi"}, "bad_message"),
    "a message of text": ({"messages": ["hi"]}, "bad_message"),
    "no role": ({"messages": [{"content": "hi"}]}, "bad_message"),
    "an unknown role": ({"messages": [{"role": "narrator", "content": "hi"}]}, "unknown_role"),
    "a role of another type": ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown_role"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}, "bad_content"),
    "no content": ({"messages": [{"role": "user"}]}, "bad_content"),
    "null content": ({"messages": [{"role": "assistant", "content": None}]}, "bad_content"),
    "a number for content": ({"messages": [{"role": "user", "content": 7}]}, "bad_content"),
    "an object for content": ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "bad_content"),
    "no parts": ({"messages": [{"role": "user", "content": []}]}, "bad_content"),
    "a part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad_content"),
    "reasoning of numbers": ({"messages": [{"role": "assistant", "content": "a", "reasoning": [1]}]}, "bad_content"),
    "tools of text": ({"messages": [*turns("a", "b")], "tools": "look"}, "bad_tools"),
    "a tool of text": ({"messages": [*turns("a", "b")], "tools": ["look"]}, "bad_tools"),
    "a number for text": ({"text": 7}, "bad_text"),
    "no text": ({"text": ""}, "empty"),
    "no ids": ({"input_ids": []}, "empty"),
    "ids of text": ({"input_ids": "12"}, "bad_input_ids"),
    "ids of floats": ({"input_ids": [1.0]}, "bad_input_ids"),
    "ids of booleans": ({"input_ids": [True]}, "bad_input_ids"),
    "a negative id": ({"input_ids": [3, -1]}, "id_outside_vocabulary"),
    "an id beyond 64 bits": ({"input_ids": [10**30]}, "id_outside_vocabulary"),
    "a short mask": ({"input_ids": [3, 4], "loss_mask": [1]}, "bad_loss_mask"),
    "a mask of twos": ({"input_ids": [3, 4], "loss_mask": [1, 2]}, "bad_loss_mask"),
    "a mask of floats": ({"input_ids": [3, 4], "loss_mask": [1.0, 0.0]}, "bad_loss_mask"),
    "a mask of zeros": ({"input_ids": [3, 4], "loss_mask": [0, 0]}, "unsupervised"),
    "no assistant": ({"messages": turns("a")}, "unsupervised"),
}


@pytest.mark.parametrize(("row", "code"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_rejected_with_its_line_and_the_next_one_is_read(
    tmp_path: Path, tokenizer: str, row: Any, code: str
) -> None:
    first, reject, last = tokenise_rows(tmp_path, tokenizer, text("a"), row, text("b"))
    assert (reject.line, reject.code) == (2, code)
    assert reject.source == str(tmp_path / "rows.jsonl")
    assert reject.reason.startswith("expected ")
    assert [text_of(tokenizer, first), text_of(tokenizer, last)] == ["a", "b"]


def test_counts_add_up_to_the_input(tmp_path: Path, tokenizer: str) -> None:
    rows = [*(row for row, _ in BAD_ROWS.values()), {"text": "a"}, "", "  ", {"messages": turns("a", "b")}]

    counted = audit(tokenise_rows(tmp_path, tokenizer, *rows))

    assert counted.rejected == Counter(code for _, code in BAD_ROWS.values())
    assert (counted.rows, counted.captured) == (len(BAD_ROWS) + 2, 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"a": 1, "b": 2}, "expected one of messages, conversations, text, input_ids; found 'a', 'b'"),
        (
            {"id": "x", "messages": None},
            "expected one of messages, conversations, text, input_ids; found 'id', 'messages' (null)",
        ),
        (
            "{bad",
            "expected one JSON object; found expecting property name enclosed in double quotes at character 2 of the row",
        ),
        (
            {"messages": [*turns("a"), {"role": "narrator", "content": "b"}]},
            "expected a role of system, developer, user, human, assistant, gpt, model, bot, tool, function, observation; "
            "found 'narrator' in message 1",
        ),
        ('{"k": {"a": 1, "b": 2, "a": 3}}', "expected each key once; found 'a' twice in one object"),
        ({"input_ids": [5, 70000]}, "expected ids within 0..258; found 70000 at token 1"),
    ],
)
def test_a_reason_says_what_was_expected_and_found(tmp_path: Path, tokenizer: str, row: Any, reason: str) -> None:
    assert reject_of(tmp_path, tokenizer, row, vocab_rows=259).reason == reason


def test_unicode_separators_inside_a_text_are_text(tmp_path: Path, tokenizer: str) -> None:
    (sample,) = tokenise_rows(tmp_path, tokenizer, '{"text": "a\u2028b\u0085c"}')
    assert text_of(tokenizer, sample) == "a\u2028b\u0085c"


def test_escaped_pairs_of_surrogates_are_characters(tmp_path: Path, tokenizer: str) -> None:
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, '{"text": "\\ud83d\\ude00"}')) == "😀"


def test_a_lone_surrogate_in_a_field_that_is_not_used_is_let_by(tmp_path: Path, tokenizer: str) -> None:
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, '{"text": "a", "note": "\\ud800"}')) == "a"


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("model", "assistant"),
        ("bot", "assistant"),
        ("developer", "system"),
        ("function", "tool"),
        ("observation", "tool"),
    ],
)
def test_roles_go_by_one_table(tmp_path: Path, tokenizer: str, given: str, role: str) -> None:
    row = {"messages": [{"role": given, "content": "x"}, {"role": "assistant", "content": "y"}]}
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, row)).startswith(f"<|im_start|>{role}\nx<|im_end|>")


def test_conversations_of_from_and_value_are_conversations(tmp_path: Path, tokenizer: str) -> None:
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    sample = sample_of(tmp_path, tokenizer, row)
    assert text_of(tokenizer, sample) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]


def test_text_parts_are_joined(tmp_path: Path, tokenizer: str) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    row = {"messages": [*turns("a"), {"role": "assistant", "content": parts}]}
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, row)) == ["hello<|im_end|>"]


def test_messages_beat_text_and_a_null_field_counts_as_absent(tmp_path: Path, tokenizer: str) -> None:
    both = sample_of(tmp_path, tokenizer, {"text": "plain", "messages": turns("a", "yo")})
    assert supervised_texts(tokenizer, both) == ["yo<|im_end|>"]
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, {"text": "plain", "messages": None})) == "plain"


def test_the_schema_is_decided_row_by_row(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "a"}, {"messages": turns("a", "b")}, {"input_ids": [3, 4]}, {"conversations": turns("a", "c")}]
    rules = [item.mask_rule for item in tokenise_rows(tmp_path, tokenizer, *rows)]
    assert rules == ["all", "substitution", "all", "substitution"]


def test_tools_written_as_json_text_are_tools(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", TOOLS)
    row = {"messages": turns("a", "yo"), "tools": '[{"name": "look"}]'}
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, row)).startswith('<|im_start|>system\n{"name": "look"}')


def test_ids_without_a_mask_are_supervised_throughout(tmp_path: Path, tokenizer: str) -> None:
    sample = sample_of(tmp_path, tokenizer, {"input_ids": [7, 5, 7]}, loss_on="assistant")
    assert sample.input_ids.tolist() == [7, 5, 7]
    assert sample.loss_mask.tolist() == [1, 1, 1]
    assert sample.mask_rule == "all"


@pytest.mark.parametrize("mask", [[0, 1, 0], [False, True, False]])
def test_a_mask_of_the_row_is_taken_as_it_is(tmp_path: Path, tokenizer: str, mask: list[Any]) -> None:
    sample = sample_of(tmp_path, tokenizer, {"input_ids": [7, 5, 7], "loss_mask": mask})
    assert sample.loss_mask.tolist() == [0, 1, 0]
    assert sample.mask_rule == "row"


@pytest.mark.parametrize("body", [{"text": "ab"}, {"messages": turns("a", "b")}, {"input_ids": [3, 258]}])
def test_ids_beyond_the_embedding_reject_the_row(tmp_path: Path, tokenizer: str, body: dict[str, Any]) -> None:
    assert reject_of(tmp_path, tokenizer, body, vocab_rows=4).code == "id_outside_vocabulary"
    assert isinstance(sample_of(tmp_path, tokenizer, body, vocab_rows=259), Sample)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id": "a"}, "a"),
        ({"id": "../../etc/passwd"}, "../../etc/passwd"),
        ({"id": "x" * 300}, "x" * 300),
        ({"id": 7}, "7"),
        ({"id": 0}, "0"),
        ({"conversation_id": "c", "uuid": "u"}, "c"),
        ({"uuid": "u"}, "u"),
        ({"id": None, "uuid": "u"}, "u"),
        ({"id": ""}, "{source}:1"),
        ({"id": ["a"]}, "{source}:1"),
        ({}, "{source}:1"),
    ],
)
def test_ids_are_kept_as_given_or_become_source_and_line(
    tmp_path: Path, tokenizer: str, fields: dict[str, Any], expected: str
) -> None:
    sample = sample_of(tmp_path, tokenizer, {**fields, "text": "a"})
    assert sample.sample_id == expected.format(source=tmp_path / "rows.jsonl")


def test_an_id_given_twice_is_kept_twice(tmp_path: Path, tokenizer: str) -> None:
    items = tokenise_rows(tmp_path, tokenizer, {"id": "a", "text": "x"}, {"id": "a", "text": "y"})
    assert [item.sample_id for item in items] == ["a", "a"]


def test_a_reject_knows_its_id_where_the_row_could_be_read(tmp_path: Path, tokenizer: str) -> None:
    assert reject_of(tmp_path, tokenizer, {"id": "a", "text": ""}).sample_id == "a"
    assert reject_of(tmp_path, tokenizer, '{"id": "a"').sample_id is None


def test_a_long_row_is_cut_with_its_mask(tmp_path: Path, tokenizer: str) -> None:
    whole = sample_of(tmp_path, tokenizer, {"messages": turns("a", "hello", "b", "zu")})

    cut = sample_of(tmp_path, tokenizer, {"messages": turns("a", "hello", "b", "zu")}, max_length=24)

    assert cut.input_ids.tolist() == whole.input_ids.tolist()[:24]
    assert cut.loss_mask.tolist() == [0] * 20 + [1, 1, 1, 1]
    assert (cut.truncated_from, whole.truncated_from) == (len(whole.input_ids), None)


def test_a_row_of_the_longest_length_is_not_cut(tmp_path: Path, tokenizer: str) -> None:
    sample = sample_of(tmp_path, tokenizer, {"text": "abcd"}, max_length=4, on_too_long="drop")
    assert (len(sample.input_ids), sample.truncated_from) == (4, None)


def test_a_long_row_is_dropped_on_request(tmp_path: Path, tokenizer: str) -> None:
    reject = reject_of(tmp_path, tokenizer, {"text": "abcde"}, max_length=4, on_too_long="drop")
    assert (reject.code, reject.reason) == ("too_long", "expected at most 4 tokens; found 5")


def test_a_cut_that_leaves_nothing_supervised_rejects_the_row_with_both_lengths(tmp_path: Path, tokenizer: str) -> None:
    reject = reject_of(tmp_path, tokenizer, {"messages": turns("a", "hello")}, max_length=20)
    assert reject.code == "unsupervised_after_truncation"
    assert reject.reason == "expected a supervised token among the first 20; found the first one of 27 tokens at 20"


def test_a_row_longer_than_the_tokenizer_likes_is_read_whole_and_quietly(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = AutoTokenizer.from_pretrained(tokenizer)
    plain.model_max_length = 8
    plain.save_pretrained(tmp_path / "short")
    sample = sample_of(tmp_path, str(tmp_path / "short"), {"messages": turns("a", "x" * 50)})
    assert sample.loss_mask.sum() == 51
    assert caplog.records == []
