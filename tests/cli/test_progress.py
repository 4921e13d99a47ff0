"""Progress: a bar on a terminal, a line a minute in a log, and the words of both."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from hiddentap.capture.cli import progress as shown_work
from hiddentap.capture.cli.progress import Bar, Lines, Nothing, ShownProgress, Stretch, duration, shown_progress
from hiddentap.capture.progress import Done, Work
from support.model_folder import CHATS, write_rows
from support.terminal import on_a_terminal


class Clock:
    """A clock that stands still between `wait`s."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(shown_work.time, "monotonic", lambda: found.now)
    return found


def without_times(lines: str) -> list[str]:
    """The lines of a log, each of which begins with date and time."""
    found = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)", line) for line in lines.splitlines()]
    assert all(found)
    return [match[1] for match in found if match]


def test_a_log_gets_one_line_a_minute_and_one_at_the_end_of_each_stretch(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ShownProgress(Lines())
    shown.started(Work("tokenizing", unit="rows"))
    for _ in range(130):
        clock.wait(1)
        shown.advanced(Done(1, rejected=1))
    shown.started(Work("capturing", 4000, tokens=100_000, done=1000, done_tokens=20_000))
    clock.wait(10)
    shown.advanced(Done(1500, 40_000, written=1_500_000))
    clock.wait(10)
    shown.advanced(Done(1500, 40_000, written=1_500_000, rejected=2))
    shown.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert without_times(err) == [
        "tokenizing: 60 rows, 60 rejected",
        "tokenizing: 120 rows, 120 rejected",
        "tokenizing: 130 rows, 130 rejected",
        "capturing: 4,000 of 4,000 samples, 2 rejected, 4,000 tokens/s, 3.0 MB written",
    ]


def test_the_time_left_goes_by_tokens_and_leaves_out_what_an_earlier_run_did(clock: Clock) -> None:
    # The shard of short samples is done: 90 of 100 samples, and 10 % of the tokens.
    work = Stretch(Work("capturing", 100, tokens=1000, done=90, done_tokens=100))
    assert work.words() == ["90 of 100 samples"]
    clock.wait(20)
    work.add(Done(5, 450))
    # 450 tokens in 20 s, and 450 are left.
    assert work.words() == ["95 of 100 samples", "20 s left", "22 tokens/s"]


def test_without_tokens_the_time_left_goes_by_samples(clock: Clock) -> None:
    work = Stretch(Work("checking files", 4, unit="shards"))
    clock.wait(100)
    work.add(Done(1))
    assert work.words() == ["1 of 4 shards", "5 min left"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (3000, "50 min"), (6000, "1 h 40 min"), (90_000, "25 h 0 min")],
)
def test_times_are_told_in_units_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quiet_shows_nothing_and_still_looks_whether_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise RuntimeError("asked to end")

    with shown_progress(True, stop) as progress:
        progress.started(Work("generating", 3))
        progress.note("something")
        with pytest.raises(RuntimeError, match="asked to end"):
            progress.advanced(Done(1, 10))
    assert capsys.readouterr() == ("", "")


def test_what_was_done_is_told_even_where_the_work_fails(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with shown_progress(False) as progress:
            progress.started(Work("exporting", 3))
            progress.advanced(Done(1))
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert without_times(capsys.readouterr().err) == ["exporting: 1 of 3 samples, 0 s left"]


def test_what_is_told_before_any_stretch_counts_for_none() -> None:
    shown = ShownProgress(Nothing())
    shown.advanced(Done(3))
    shown.started(Work("exporting", 3))
    shown.close()


def test_a_piped_capture_is_plain_lines(run: Callable[..., tuple[int, str, str]], llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [*CHATS, {"foo": 1}])
    code, _, err = run("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    assert code == 0
    assert "\x1b" not in err
    first, *lines = without_times(err)
    assert first.startswith("the model has 256 positions")
    assert lines[0] == "tokenizing: 6 rows, 1 rejected"
    assert re.fullmatch(r"plan: 5 samples, [\d,]+ tokens", lines[1])
    assert re.fullmatch(r"capturing: 5 of 5 samples, 1 rejected, [\d,]+ tokens/s, [\d.]+ kB written", lines[-1])


@pytest.mark.parametrize(("columns", "bar"), [(80, "━{8,20}"), (120, "━{24}")])
def test_a_terminal_gets_a_bar_with_samples_rejects_speed_and_bytes(
    llama: Path, tmp_path: Path, columns: int, bar: str
) -> None:
    data = write_rows(tmp_path / "d.jsonl", [*CHATS, {"foo": 1}])
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_a_terminal(*command, columns=columns))
    assert re.search(rf"capturing {bar} 5/5 samples · 1 rejected · [\d,]+ tokens/s · [\d.]+ kB", plain)
    assert "capturing:" not in plain
    assert "5 captured, 1 rejected" in plain


def test_a_narrow_terminal_loses_the_last_words_and_no_bar(clock: Clock) -> None:
    work = Stretch(Work("capturing", 4000, tokens=100_000))
    clock.wait(10)
    work.add(Done(1500, 40_000, 1_500_000, 2))
    said = {columns: Bar(Console(file=io.StringIO(), width=columns))._fitted(work) for columns in (80, 60, 30)}
    assert said == {
        80: "1,500/4,000 samples · 2 rejected · 15 s left · 4,000 tokens/s",
        60: "1,500/4,000 samples · 2 rejected · 15 s left",
        30: "1,500/4,000 samples",
    }
