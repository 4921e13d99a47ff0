"""Tokenisation in processes: the same items, and an end within seconds when one fails."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hiddentap.capture.data import RecordEncoder, Reject, SourceError, TokeniseOptions, tokenise
from hiddentap.models.errors import RunError, UsageError
from support.rows import turns, write_lines
from support.templates import CHATML, byte_tokenizer


@pytest.fixture
def options(tmp_path: Path) -> TokeniseOptions:
    return TokeniseOptions(tokenizer=byte_tokenizer(tmp_path / "t", CHATML), template_date="2024-02-03")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_lines(
        tmp_path / "rows.jsonl",
        [{"id": n, "messages": turns("a", "b" * n)} if n % 7 else {"id": n} for n in range(400)],
    )


def test_items_come_in_input_order_and_are_those_of_one_process(options: TokeniseOptions, rows: str) -> None:
    alone, spread = (
        list(tokenise([rows], RecordEncoder(options))),
        list(tokenise([rows], RecordEncoder(options), workers=2)),
    )

    assert [item.sample_id for item in spread] == [str(n) for n in range(400)]
    assert len(alone) == 400
    for one, other in zip(alone, spread, strict=True):
        if isinstance(one, Reject):
            assert one == other
        else:
            assert one.input_ids.tolist() == other.input_ids.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()
    assert multiprocessing.active_children() == []


def test_of_more_workers_than_there_is_work_for_the_others_are_not_started(options: TokeniseOptions, rows: str) -> None:
    items = tokenise([rows], RecordEncoder(options), workers=3, limit=1)
    assert next(items).sample_id == "0"
    assert len(multiprocessing.active_children()) == 1
    assert list(items) == []
    assert multiprocessing.active_children() == []


def test_no_rows_need_no_worker(tmp_path: Path, options: TokeniseOptions) -> None:
    (tmp_path / "none.jsonl").write_text("")
    assert list(tokenise([str(tmp_path / "none.jsonl")], RecordEncoder(options), workers=2)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_the_limit_counts_input_rows_and_no_blank_lines(tmp_path: Path, options: TokeniseOptions, workers: int) -> None:
    source = write_lines(tmp_path / "few.jsonl", ["", {"text": "a"}, "", "bad", {"text": "c"}, {"text": "d"}])
    assert [item.line for item in tokenise([source], RecordEncoder(options), workers=workers, limit=3)] == [2, 4, 5]


def test_a_workers_error_ends_the_iteration_with_that_error(tmp_path: Path, rows: str) -> None:
    options = TokeniseOptions(tokenizer=str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="expected a tokenizer at"):
        list(tokenise([rows], RecordEncoder(options), workers=1))
    assert multiprocessing.active_children() == []


def test_a_killed_worker_ends_the_iteration_within_seconds(options: TokeniseOptions, rows: str) -> None:
    items = tokenise([rows], RecordEncoder(options), workers=2)
    next(items)
    started = time.monotonic()
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(RunError, match=r"one ended with exit code -9"):
        list(items)
    assert time.monotonic() - started < 60


def test_a_damaged_source_ends_the_iteration_and_the_workers(
    tmp_path: Path, options: TokeniseOptions, rows: str
) -> None:
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(b"no gzip")
    with pytest.raises(SourceError, match=r"bad\.jsonl\.gz"):
        list(tokenise([rows, str(bad)], RecordEncoder(options), workers=1))
    assert multiprocessing.active_children() == []


def test_leaving_the_iteration_ends_the_workers(options: TokeniseOptions, rows: str) -> None:
    items = tokenise([rows], RecordEncoder(options), workers=2)
    next(items)
    assert len(multiprocessing.active_children()) == 2
    items.close()
    assert multiprocessing.active_children() == []


# Tests that a shell started in the background inherit that SIGINT is ignored; a person's run does not.
SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from hiddentap.capture.data import RecordEncoder, TokeniseOptions, tokenise
if __name__ == "__main__":
    items = tokenise([sys.argv[1]] * 1000, RecordEncoder(TokeniseOptions(tokenizer=sys.argv[2])), workers=2)
    next(items)
    print("started", flush=True)
    for item in items:
        pass
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_or_killed_run(
    tmp_path: Path, options: TokeniseOptions, rows: str, end: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(script), rows, options.tokenizer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"started\n"
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) >= 2

    os.killpg(run.pid, end) if end == signal.SIGINT else os.kill(run.pid, end)

    run.communicate(timeout=10)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


@pytest.mark.parametrize("bad", [{"workers": -1}, {"limit": -1}])
def test_negative_counts_are_wrong_use(options: TokeniseOptions, bad: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 0"):
        tokenise([], RecordEncoder(options), **bad)
