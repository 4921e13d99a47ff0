"""Input files for tests, and a plain reading of what a mask marks."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hiddentap.capture.data import Reject, Sample
from hiddentap.capture.data.encoder import RecordEncoder
from hiddentap.capture.data.options import TokeniseOptions
from hiddentap.capture.data.tokenise import tokenise


def write_lines(path: Path, rows: Iterable[Any]) -> str:
    """One line per row; a string or bytes row is written as it is."""
    with path.open("wb") as file:
        for row in rows:
            text = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            file.write(text + b"\n")
    return str(path)


def turns(*texts: str, first: str = "user") -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = itertools.cycle(("user", "assistant") if first == "user" else ("assistant", "user"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def tokenise_rows(tmp_path: Path, tokenizer: str, *rows: Any, **options: Any) -> list[Sample | Reject]:
    """The items of the rows, through a file."""
    source = write_lines(tmp_path / "rows.jsonl", rows)
    return list(
        tokenise([source], RecordEncoder(TokeniseOptions(tokenizer=tokenizer, template_date="2024-02-03", **options)))
    )


def sample_of(tmp_path: Path, tokenizer: str, row: Any, **options: Any) -> Sample:
    """The sample of one row that must be captured."""
    (item,) = tokenise_rows(tmp_path, tokenizer, row, **options)
    assert isinstance(item, Sample), item
    return item


def reject_of(tmp_path: Path, tokenizer: str, row: Any, **options: Any) -> Reject:
    """The reject of one row that must not be captured."""
    (item,) = tokenise_rows(tmp_path, tokenizer, row, **options)
    assert isinstance(item, Reject), item
    return item


def supervised_texts(tokenizer: str, sample: Sample) -> list[str]:
    """The text of each run of supervised tokens."""
    decoder = AutoTokenizer.from_pretrained(tokenizer)
    runs = itertools.groupby(
        zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True), lambda pair: pair[1]
    )
    return [decoder.decode([token for token, _ in run]) for mark, run in runs if mark]


def text_of(tokenizer: str, sample: Sample) -> str:
    """The whole text of a sample."""
    return str(AutoTokenizer.from_pretrained(tokenizer).decode(sample.input_ids.tolist()))
