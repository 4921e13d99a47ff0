"""Tables as sources, and what is said where the extra for them is not installed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.data import RecordEncoder, Sample, SourceError, TokeniseOptions, tokenise
from hiddentap.capture.data.records.sources import read_records
from hiddentap.models.errors import UsageError
from support.rows import sample_of, supervised_texts, text_of
from support.templates import TOOLS, byte_tokenizer

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "hi", "tool_calls": None}], "text": None},
    {"id": "b", "messages": None, "text": "plain"},
]


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("source", ["rows.parquet", "saved", "owner/name", "owner/name:test"])
def test_without_the_extra_a_table_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_extra: None, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.parquet").write_bytes(b"")
    Path("saved").mkdir()
    Path("saved/state.json").write_text("{}")
    with pytest.raises(UsageError, match=rf"reading {source} needs .*: pip install 'hiddentap\[datasets\]'"):
        next(read_records([source]))


def test_a_parquet_file_gives_its_rows(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    assert [(row.line, row.payload) for row in read_records([str(path)])] == [(1, ROWS[0]), (2, ROWS[1])]


def test_a_damaged_parquet_file_is_an_error_of_the_run(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError, match="readable to its end"):
        list(read_records([str(path)]))


def saved_rows(folder: Path) -> Any:
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    # A fingerprint of our own: computing one pickles parts of pyarrow, which fails for some pairs of versions.
    table = datasets.Dataset(arrow.Table.from_pylist(ROWS), fingerprint="rows")
    table.save_to_disk(folder)
    return table


def test_a_saved_dataset_gives_its_rows(tmp_path: Path) -> None:
    saved_rows(tmp_path / "saved")
    rows = [(row.line, row.payload["id"], row.payload["text"]) for row in read_records([str(tmp_path / "saved")])]
    assert rows == [(1, "a", None), (2, "b", "plain")]


def test_a_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = saved_rows(tmp_path / "alone")
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"found \['test', 'train'\]"):
        list(read_records([str(tmp_path / "saved")]))
    assert len(list(read_records([str(tmp_path / "saved" / "train")]))) == 2


def test_a_hub_dataset_that_cannot_be_reached_is_an_error_of_the_run() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(SourceError, match="owner/nothing-here"):
        list(read_records(["owner/nothing-here"]))


def test_nulls_that_a_table_puts_into_objects_are_taken_out_of_tools_and_calls(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    tools = [
        {"name": "look", "parameters": {"where": {"type": "string"}}},
        {"name": "add", "parameters": {"a": {"type": "number"}, "b": {"type": "number"}}},
    ]
    calls = [
        {"function": {"name": "look", "arguments": {"where": "up"}}},
        {"function": {"name": "add", "arguments": {"a": 1}}},
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"messages": messages, "tools": tools}]), path)
    (stored,) = parquet.read_table(path).to_pylist()
    assert stored["tools"][0]["parameters"]["a"] is None
    tokenizer = byte_tokenizer(tmp_path / "t", TOOLS)

    (sample,) = tokenise([str(path)], RecordEncoder(TokeniseOptions(tokenizer=tokenizer, template_date="2024-02-03")))

    assert isinstance(sample, Sample)
    assert "null" not in text_of(tokenizer, sample)
    plain = sample_of(tmp_path, tokenizer, {"messages": messages, "tools": tools})
    assert sample.input_ids.tolist() == plain.input_ids.tolist()
    assert supervised_texts(tokenizer, sample) == [
        '<tool_call>\nlook {"where": "up"}\n</tool_call>\n<tool_call>\nadd {"a": 1}\n</tool_call><|im_end|>'
    ]


def test_masks_and_labels_of_a_parquet_file_are_read(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [9, 5, 6], "labels": [-100, -100, 6], "attention_mask": [0, 1, 1]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options = TokeniseOptions(tokenizer=byte_tokenizer(tmp_path / "t"), template_date="2024-02-03")
    found = [
        (item.input_ids.tolist(), item.loss_mask.tolist())
        for item in tokenise([str(tmp_path / "rows.parquet")], RecordEncoder(options))
    ]
    assert found == [([5, 6, 7], [0, 1, 1]), ([5, 6], [0, 1])]
