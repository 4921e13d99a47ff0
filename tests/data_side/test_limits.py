"""Limits of time and size: a hostile template, file or image ends as a reject or as one error, never as a hang."""

import gzip
import os
import threading
import time
from pathlib import Path

import pytest

from hiddentap.capture.data import SourceError, encoder
from hiddentap.capture.data.chat.deadline import DeadlineExceeded, deadline
from hiddentap.capture.data.records import json_files
from hiddentap.capture.data.records.sources import read_records
from support.rows import reject_of, sample_of, tokenise_rows, turns
from support.templates import CHATML, byte_tokenizer

LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_a_reject_and_the_next_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "RECORD_SECONDS", 1.0)
    template = "{% if 'loop' in messages[0].content %}" + LOOPING + "{% endif %}" + CHATML
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    slow, fine = tokenise_rows(
        tmp_path, tokenizer, {"id": "s", "messages": turns("loop", "b")}, {"messages": turns("a", "yo")}
    )
    assert (slow.code, slow.sample_id, slow.line) == ("too_slow", "s", 1)
    assert slow.reason.startswith("expected a row to be rendered and tokenized within 1 s")
    assert fine.loss_mask.sum() == 3


def test_a_template_that_fills_memory_is_a_reject_long_before_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "RECORD_BYTES", 64 << 20)
    growing = (
        "{% set ns = namespace(x='a') %}{% for i in range(27) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}" + LOOPING
    )
    template = "{% if 'grow' in messages[0].content %}" + growing + "{% endif %}" + CHATML
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    large, fine = tokenise_rows(
        tmp_path, tokenizer, {"id": "s", "messages": turns("grow", "b")}, {"messages": turns("a", "yo")}
    )
    assert (large.code, large.sample_id) == ("too_large", "s")
    assert "within 0.0625 GiB of memory" in large.reason
    assert fine.loss_mask.sum() == 3


def test_memory_that_was_there_before_a_block_does_not_count() -> None:
    held = bytearray(os.urandom(1 << 20) * 256)
    end = time.monotonic() + 0.5
    with deadline(60, 64 << 20):
        while time.monotonic() < end:
            pass
    assert len(held) == 256 << 20


def test_a_deadline_holds_in_any_thread_and_leaves_others_alone() -> None:
    found: list[str] = []

    def work() -> None:
        try:
            with deadline(0.2):
                while True:
                    pass
        except DeadlineExceeded:
            found.append("over")

    thread = threading.Thread(target=work)
    thread.start()
    with deadline(60):
        thread.join(20)
    assert found == ["over"]


def test_a_block_that_ends_in_time_is_not_interrupted_later() -> None:
    for seconds in (0.05, 0.1, 0.15, 0.2):
        with deadline(seconds):
            pass
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        pass


def spin_until(seconds: float) -> None:
    with deadline(seconds):
        while True:
            pass


def test_deadlines_follow_one_another_in_one_thread() -> None:
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            spin_until(0.05)


def test_an_empty_gzip_file_is_a_damaged_source_and_one_without_rows_is_not(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").touch()
    (tmp_path / "none.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(SourceError, match=r"cut\.jsonl\.gz to be gzip; found a file of 0 bytes"):
        list(read_records([str(tmp_path / "none.jsonl"), str(tmp_path / "cut.jsonl.gz")]))
    assert list(read_records([str(tmp_path / "none.jsonl.gz"), str(tmp_path / "none.jsonl")])) == []


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_line_longer_than_any_row_ends_the_run_before_it_is_read_whole(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "MAX_RECORD_BYTES", 1 << 20)
    data = b'{"text": "a"}\n' + b" " * (8 << 20)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    rows = read_records([str(tmp_path / name)])
    assert next(rows).line == 1
    with pytest.raises(SourceError, match=r"expected lines of at most 1 MiB in .*; found a longer one at line 2"):
        next(rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_device_or_a_pipe_is_no_source(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    with pytest.raises(SourceError, match="to be a regular file; found a device or a pipe"):
        read_records([str(path)])


def test_an_image_that_is_a_device_or_too_large_is_a_reject(tmp_path: Path) -> None:
    from hiddentap.capture.data.errors import RecordError
    from hiddentap.capture.data.images.files import read_image

    pytest.importorskip("PIL")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(1 << 40)
    for name, reason in (("zero.png", "found no regular file"), ("large.png", "found 1,099,511,627,776 bytes")):
        with pytest.raises(RecordError, match=reason):
            read_image(tmp_path / name)


def test_code_of_a_template_that_fails_in_any_way_is_a_reject(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", "{{ 1 // 0 }}" + CHATML)
    assert reject_of(tmp_path, tokenizer, {"messages": turns("a", "b")}).code == "template_error"
    assert sample_of(tmp_path, tokenizer, {"text": "a"}).loss_mask.tolist() == [1]
