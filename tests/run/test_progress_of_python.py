"""What a Python user hears of a run, and how one ends it."""

import logging
import signal
from pathlib import Path

import pytest

from hiddentap import CaptureSettings, Done, Progress, Stopping, Work, capture_dataset
from hiddentap.capture.run import RunStopped
from support.model_folder import CHATS, write_rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", CHATS)


def test_notes_of_a_run_go_to_the_log(
    llama: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hiddentap"):
        capture_dataset(CaptureSettings(llama, data, tmp_path / "out", layer_ids=[1]))
    notes = [record.getMessage() for record in caplog.records if record.name == "hiddentap"]
    assert any(note.startswith("plan: 5 samples") for note in notes)


def test_a_progress_of_ones_own_hears_of_every_sample_and_byte(llama: Path, data: Path, tmp_path: Path) -> None:
    class Heard(Progress):
        def __init__(self) -> None:
            self.works: list[Work] = []
            self.done: dict[str, Done] = {}

        def started(self, work: Work) -> None:
            self.works.append(work)
            self.done[work.what] = Done()

        def advanced(self, done: Done) -> None:
            self.done[self.works[-1].what] += done

        def note(self, text: str) -> None:
            return

    heard = Heard()
    summary = capture_dataset(CaptureSettings(llama, data, tmp_path / "out", layer_ids=[1]), heard)
    assert heard.done["capturing"].count == summary.captured == 5
    assert heard.done["capturing"].tokens == summary.tokens
    assert heard.done["capturing"].written > 0


def test_a_run_is_ended_from_outside_with_the_exit_code_of_the_signal(llama: Path, data: Path, tmp_path: Path) -> None:
    stopping = Stopping()
    stopping.ask(signal.SIGTERM)
    with pytest.raises(RunStopped) as stopped:
        capture_dataset(CaptureSettings(llama, data, tmp_path / "out", layer_ids=[1]), None, stopping)
    assert stopped.value.exit_code == 143
