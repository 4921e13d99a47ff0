"""What an audit counts and shows."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from hiddentap.capture.data import Audit, Reject, RejectGate, Sample, audit, marked_text
from support.rows import sample_of, turns
from support.templates import CHATML, byte_tokenizer


def sample(length: int, supervised: int, warnings: tuple[str, ...] = (), cut: int | None = None) -> Sample:
    mask = np.array([1] * supervised + [0] * (length - supervised), np.uint8)
    return Sample("a", "rows.jsonl", 1, np.zeros(length, np.int32), mask, "substitution", warnings, cut)


def test_an_audit_counts_everything_once() -> None:
    rejects = [
        Reject.of("rows.jsonl", 3, None, "first", "bad_json"),
        Reject.of("rows.jsonl", 5, "x", "second", "unsupervised"),
        Reject.of("rows.jsonl", 6, "y", "third", "unsupervised"),
        Reject.of("rows.jsonl", 7, "z", "fourth", "unsupervised_after_truncation"),
    ]
    items = [sample(4, 2, ("tools_dropped",)), *rejects, sample(8, 1, ("content_changed", "tools_dropped"), cut=9)]

    assert audit(iter(items)) == Audit(
        rows=6,
        captured=2,
        rejected={"unsupervised": 2, "bad_json": 1, "unsupervised_after_truncation": 1},
        first_reject={"bad_json": rejects[0], "unsupervised": rejects[1], "unsupervised_after_truncation": rejects[3]},
        truncated=1,
        unsupervised=3,
        warnings={"tools_dropped": 2, "content_changed": 1},
        first_warning={"tools_dropped": "rows.jsonl:1", "content_changed": "rows.jsonl:1"},
        fields_read={},
        fields_unread={},
        mask_rules={"substitution": 2},
        tokens=12,
        supervised_tokens=3,
        length_percentiles={0: 4, 10: 4, 50: 4, 90: 8, 99: 8, 100: 8},
    )


def test_an_audit_says_where_a_strict_run_would_end_and_counts_on() -> None:
    items = [sample(4, 2), Reject.of("rows.jsonl", 3, None, "no JSON", "bad_json"), sample(8, 1)]
    strict, free = audit(items, RejectGate(strict=True)), audit(items, RejectGate())
    assert strict.ending == "rows.jsonl, line 3: no JSON (strict: the first rejected row ends the run)"
    assert (strict.rows, strict.captured, free.ending) == (3, 2, "")


def test_an_audit_says_that_a_run_would_end_for_its_rejects() -> None:
    items = [*[sample(4, 2)] * 17, *[Reject.of("rows.jsonl", 5, "x", "second", "unsupervised")] * 3]
    assert audit(items).ending == (
        "expected at most 10 % of the rows to be rejected; found 3 of 20: 3 unsupervised, first at rows.jsonl:5: second. Mend "
        "the rows, or allow more rejects (--max-reject-rate)"
    )


def test_rows_that_are_allowed_to_go_end_nothing() -> None:
    items = [Reject.of("rows.jsonl", 5, "x", "second", "unsupervised")] * 30 + [sample(4, 2)]
    assert audit(items, RejectGate(1)).ending == ""


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = audit(sample(length, 1) for length in range(1, 101)).length_percentiles
    assert lengths == {0: 1, 10: 10, 50: 50, 90: 90, 99: 99, 100: 100}


def test_an_audit_of_nothing_is_all_zeros() -> None:
    empty = audit([])
    assert (empty.rows, empty.captured, empty.tokens, empty.rejected, empty.length_percentiles) == (0, 0, 0, {}, {})


def test_a_row_is_shown_cut_where_its_mask_changes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    row = sample_of(tmp_path, tokenizer, {"messages": turns("é 😀", " yo ", "b", "日本")})
    assert marked_text(AutoTokenizer.from_pretrained(tokenizer), row) == [
        ("<|im_start|>user\né 😀<|im_end|>\n<|im_start|>assistant\n", False),
        (" yo <|im_end|>", True),
        ("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False),
        ("日本<|im_end|>", True),
        ("\n", False),
    ]


def test_a_mask_that_cuts_a_character_shows_the_whole_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    row = {"input_ids": AutoTokenizer.from_pretrained(tokenizer)("a😀b")["input_ids"], "loss_mask": [0, 0, 0, 1, 1, 1]}
    assert marked_text(AutoTokenizer.from_pretrained(tokenizer), sample_of(tmp_path, tokenizer, row)) == [
        ("a", False),
        ("😀b", True),
    ]


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (np.zeros(3, np.int64), np.zeros(3, np.uint8)),
        (np.zeros(3, np.int32), np.zeros(3, np.bool_)),
        (np.zeros(3, np.int32), np.zeros(2, np.uint8)),
        (np.zeros(0, np.int32), np.zeros(0, np.uint8)),
        (np.zeros((1, 3), np.int32), np.zeros((1, 3), np.uint8)),
    ],
)
def test_a_sample_of_another_shape_or_dtype_cannot_be_made(ids: np.ndarray, mask: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected input_ids \(S,\) int32 and loss_mask \(S,\) uint8"):
        Sample("a", "rows.jsonl", 1, ids, mask, "all")
