"""Where rows come from: what splits them, what damages a source."""

import gzip
import json
from pathlib import Path

import pytest

from hiddentap.capture.data import SourceError
from hiddentap.capture.data.records.sources import read_records
from hiddentap.models.errors import UsageError


def payloads(path: Path) -> list[tuple[int, bytes]]:
    return [(row.line, row.payload) for row in read_records([str(path)])]


def test_lines_end_at_the_newline_byte_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    separators = "\u2028 \u2029 \u0085 \x0b \x0c \x1c"
    path.write_bytes(f'{{"text": "{separators}"}}\n{{"a":\r1}}\n'.encode())
    assert payloads(path) == [(1, f'{{"text": "{separators}"}}\n'.encode()), (2, b'{"a":\r1}\n')]


def test_a_byte_order_mark_crlf_blank_lines_and_a_last_line_without_newline_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\r\n\r\n \t\n{"a":2}')
    assert payloads(path) == [(1, b'{"a":1}\r\n'), (4, b'{"a":2}')]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"")
    assert payloads(path) == []


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a":1}\n{"a":') + gzip.compress(b"2}\n"))
    assert payloads(path) == [(1, b'{"a":1}\n'), (2, b'{"a":2}\n')]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: data[:40] + b"\xff" * 8 + data[48:],
        lambda data: b"not gzip",
        lambda data: data + b"tail",
    ],
    ids=["truncated", "flipped", "no gzip", "garbage after it"],
)
def test_a_damaged_gzip_file_is_an_error_of_the_run(tmp_path: Path, damage) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b"".join(b'{"a":%d}\n' % (n * n) for n in range(1000)))))
    with pytest.raises(SourceError, match=r"expected .*rows.jsonl.gz to be readable to its end; found a damaged file"):
        payloads(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.parquet"])
def test_a_missing_file_is_an_error_before_any_row_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match="found nothing there; check the path"):
        read_records([str(tmp_path / name)])


def test_a_folder_where_a_file_is_due_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(SourceError, match="found a folder"):
        read_records([str(tmp_path / "rows.jsonl")])


def test_a_file_of_another_kind_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("{}")
    with pytest.raises(UsageError, match=r"expected a file named .jsonl, .jsonl.gz, .json, .parquet; found"):
        read_records([str(tmp_path / "rows.txt")])


def test_a_name_that_is_neither_file_nor_dataset_is_an_error() -> None:
    with pytest.raises(SourceError, match="found nothing at 'no such thing'"):
        read_records(["no such thing"])


def test_one_string_for_the_list_of_sources_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="expected a list of sources"):
        read_records("rows.jsonl")


def test_sources_come_in_order_and_lines_count_from_one_in_each(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text('{"a":1}\n{"a":2}\n')
    rows = read_records([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
    assert [(Path(row.source).name, row.line) for row in rows] == [
        ("b.jsonl", 1),
        ("b.jsonl", 2),
        ("a.jsonl", 1),
        ("a.jsonl", 2),
    ]


def test_reading_streams(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a":1}\n' * 100_000)[:-100])
    rows = read_records([str(path)])
    assert next(rows).line == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a": 1}, {"a": [1, "]"]}]', [{"a": 1}, {"a": [1, "]"]}]),
        ('\n[\n {"a": "é"}\n,\n 7 ]\n', [{"a": "é"}, 7]),
        ('{"a": {"b": 1}}\n', [{"a": {"b": 1}}]),
        ("[]", []),
    ],
)
def test_a_json_document_is_a_list_of_rows_or_one_row(tmp_path: Path, text: str, expected: list[object]) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = payloads(path)
    assert [json.loads(payload) for _, payload in rows] == expected
    assert [line for line, _ in rows] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize(
    "text", ['[{"a": 1}, {"a": ]', '[{"a": 1}', '[{"a": 1} {"a": 2}]', "", '[{"a": 1}]x', '{"a": 1}\n{"a": 2}', '[1,"']
)
def test_a_json_document_that_is_cut_or_no_json_is_an_error_of_the_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=r"rows\.json"):
        payloads(path)


def test_a_json_document_of_lines_is_told_to_be_named_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(SourceError, match=r"name it \.jsonl"):
        payloads(path)


def test_a_json_document_that_is_not_utf8_is_an_error_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": "\xff"}]')
    with pytest.raises(SourceError, match="UTF-8"):
        payloads(path)


def test_a_bad_item_of_a_json_document_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    items = ['{"text": "a"}', '{"text": "b", "n": ' + "9" * 5000 + "}", '{"text": "c", "text": "d"}', '{"text": NaN}']
    path.write_text(f"[{', '.join(items)}]")
    assert [payload.decode() for _, payload in payloads(path)] == items
