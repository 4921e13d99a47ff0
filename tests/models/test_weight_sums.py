"""The checksums of all weights: of every byte, of every file, with progress for large ones."""

import zlib
from pathlib import Path

import pytest

from hiddentap.capture import weights_read
from hiddentap.capture.progress import Done, Silent, Work
from hiddentap.capture.weights_read import checked_weight_sums


class Recorder(Silent):
    def __init__(self) -> None:
        self.work: list[Work] = []
        self.done = Done()

    def started(self, work: Work) -> None:
        self.work.append(work)

    def advanced(self, done: Done) -> None:
        self.done += done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"model-{number:05d}.safetensors").write_bytes(bytes([number]) * 300_000)
    return tmp_path


def test_each_file_has_the_checksum_of_its_bytes_and_progress_adds_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_read, "_REPORTED_BYTES", 0)
    told = Recorder()
    assert checked_weight_sums(folder, told) == {
        f"model-{number:05d}.safetensors": f"{zlib.crc32(bytes([number]) * 300_000):08x}" for number in range(20)
    }
    assert told.work == [Work("checksums of the weights", 6, unit="MB")]
    assert told.done == Done(6)


def test_small_weights_are_read_without_a_word_and_a_stop_ends_the_reading(folder: Path) -> None:
    told = Recorder()
    checked_weight_sums(folder, told)
    assert told.work == []

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked_weight_sums(folder, told, stop)
