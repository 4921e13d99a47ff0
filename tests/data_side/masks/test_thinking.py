"""Thinking is kept in the loss mask, or taken out on request, whatever the template and the tokenizer."""

from pathlib import Path

import pytest

from hiddentap.capture.data.audit import audit
from support.rows import reject_of, sample_of, supervised_texts, tokenise_rows, turns
from support.templates import CHATML, MARKED, REWRITING, byte_tokenizer, merging_tokenizer

CONTENT = "<think>\nhm\n</think>\n\nyo"
# As some models' templates are: the generation prompt opens the thinking.
OPENED = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")
UNTAGGED = CHATML.replace("+ message.content", "+ (message.reasoning_content or '') + '|' + message.content")


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        (CHATML, CONTENT + "<|im_end|>"),
        (MARKED, CONTENT + "<|im_end|>"),
        (REWRITING, CONTENT + "<|im_end|>"),
        (OPENED, "hm\n</think>\n\nyo<|im_end|>"),
    ],
    ids=["substitution", "generation marks", "rewriting", "opened by the prompt"],
)
def test_a_think_block_of_the_content_is_supervised_unless_masked(tmp_path: Path, template: str, kept: str) -> None:
    tokenizer, row = byte_tokenizer(tmp_path / "t", template), {"messages": turns("a", CONTENT)}
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, row)) == [kept]
    masked = sample_of(tmp_path, tokenizer, row, think="mask")
    assert supervised_texts(tokenizer, masked) == ["\n\nyo<|im_end|>"]


def test_each_answer_is_looked_at_for_itself(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    texts = ("<think> never closed", "<think>a</think>b<think>c</think>d", "x </think>", "<think>open", "y", "z")
    sample = sample_of(tmp_path, tokenizer, {"messages": turns(*texts)}, think="mask")
    assert supervised_texts(tokenizer, sample) == ["b", "d<|im_end|>", "z<|im_end|>"]


def test_an_empty_block_is_masked_with_its_tags(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "<think></think>yo")}, think="mask")
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]


def test_a_token_that_closes_thinking_and_starts_the_answer_is_masked(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(tmp_path / "t", CHATML, merges=((">", "y"),))
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "<think>é</think>yo")}, think="mask")
    assert supervised_texts(tokenizer, sample) == ["o<|im_end|>"]


def test_thinking_is_masked_before_a_row_is_cut(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    row = {"messages": turns("a", "<think>hmmmm</think>yo")}
    # 8 + 19 tokens up to the answer's first letter; the cut falls inside the thinking.
    assert reject_of(tmp_path, tokenizer, row, think="mask", max_length=30).code == "unsupervised_after_truncation"
    assert sample_of(tmp_path, tokenizer, row, max_length=30).supervised > 0


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"text": "a<think>b</think>c"}, {}, ["a", "c"]),
        (
            {"messages": turns("a<think>b</think>", "c")},
            {"loss_on": "all"},
            ["<|im_start|>user\na", "<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"],
        ),
    ],
    ids=["text", "loss on all"],
)
def test_thinking_is_masked_where_everything_is_supervised(
    tmp_path: Path, row: dict, options: dict, expected: list
) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    sample = sample_of(tmp_path, tokenizer, row, think="mask", **options)
    assert supervised_texts(tokenizer, sample) == expected


def test_a_rows_own_mask_is_narrowed(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    ids = sample_of(tmp_path, tokenizer, {"text": "ab<think>c</think>de"}).input_ids.tolist()
    row = {"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 2) + [0]}
    sample = sample_of(tmp_path, tokenizer, row, think="mask")
    assert (supervised_texts(tokenizer, sample), sample.mask_rule) == (["b", "d"], "row")


def test_reasoning_without_tags_is_rejected_where_it_should_be_masked(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", UNTAGGED)
    row = {"messages": [*turns("a"), {"role": "assistant", "reasoning_content": "hm", "content": "yo"}]}
    reject = reject_of(tmp_path, tokenizer, row, think="mask")
    assert reject.code == "thinking_not_tagged"
    assert "the reasoning of message 1 between <think> and </think>" in reject.reason
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, row)) == ["hm|yo<|im_end|>"]


def test_an_audit_counts_what_masking_leaves(tmp_path: Path) -> None:
    tokenizer, row = byte_tokenizer(tmp_path / "t", CHATML), {"messages": turns("a", "<think>hm</think>yo")}
    assert audit(tokenise_rows(tmp_path, tokenizer, row)).supervised_tokens == 20
    assert audit(tokenise_rows(tmp_path, tokenizer, row, think="mask")).supervised_tokens == 3


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["substitution", "generation marks"])
def test_thinking_that_is_closed_and_never_opened_is_masked_up_to_the_tag(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    for content, left in (
        ("hm\n</think>\n\nyo", "\n\nyo"),
        ("a</think>b<think>c</think>d", "b|d"),
        ("</think>yo", "yo"),
    ):
        sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", content)}, think="mask")
        assert "|".join(supervised_texts(tokenizer, sample)) == left + "<|im_end|>"
