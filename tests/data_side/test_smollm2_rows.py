"""Rows through the tokenizer and template of a real model."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hiddentap.capture.data import marked_text
from support.rows import sample_of, supervised_texts, tokenise_rows, turns

pytestmark = pytest.mark.smollm2

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_only_answers_and_their_end_marks_are_supervised(tmp_path: Path, smollm2_folder: Path) -> None:
    row = {"messages": turns("What is 2+2?", "It is 4.", "And 3+3?", "It's  **6**.\n\n```python\n3 + 3\n```\n")}

    sample = sample_of(tmp_path, str(smollm2_folder), row, vocab_rows=49152)

    assert marked_text(AutoTokenizer.from_pretrained(smollm2_folder), sample) == [
        (f"{SYSTEM}<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("It is 4.<|im_end|>", True),
        ("\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n", False),
        ("It's  **6**.\n\n```python\n3 + 3\n```\n<|im_end|>", True),
        ("\n", False),
    ]
    assert sample.warnings == ()


def test_an_answer_that_begins_with_blank_lines_loses_the_one_that_merges_with_its_header(
    tmp_path: Path, smollm2_folder: Path
) -> None:
    sample = sample_of(tmp_path, str(smollm2_folder), {"messages": turns("Hi", "\n\nHello there")})
    assert supervised_texts(str(smollm2_folder), sample) == ["\nHello there<|im_end|>"]
    assert sample.warnings == ("token_straddles_span",)


def test_masks_are_those_of_counting_tokens_piece_by_piece(tmp_path: Path, smollm2_folder: Path) -> None:
    """Around this model's special tokens nothing merges, so pieces tokenised alone are a fair second opinion."""
    plain = AutoTokenizer.from_pretrained(smollm2_folder)
    topics = ["prime numbers", "the Straße", "日本語", "emoji 😀😀", "tabs\tand\nlines", "<|im_end|> itself", "x" * 300]
    rows = [turns(f"Tell me of {topic}", f"On {topic}: well.", topic, topic + "!") for topic in topics]

    for messages, sample in zip(rows, tokenise_rows(tmp_path, str(smollm2_folder), *map(as_row, rows)), strict=True):
        ids, mask = plain(SYSTEM)["input_ids"], []
        mask += [0] * len(ids)
        for message in messages:
            marked = int(message["role"] == "assistant")
            for text, mark in (
                (f"<|im_start|>{message['role']}\n", 0),
                (f"{message['content']}<|im_end|>", marked),
                ("\n", 0),
            ):
                piece = plain(text)["input_ids"]
                ids, mask = ids + piece, mask + [mark] * len(piece)
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask


def as_row(messages: list[dict[str, str]]) -> dict[str, object]:
    return {"messages": messages}
