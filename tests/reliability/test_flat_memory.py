"""Memory does not grow with the number of samples, nor behind a slow disk."""

from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from support.model_folder import llama_folder, write_rows
from support.peak_memory import peak_above_model

BATCH_TOKENS = 512


@pytest.fixture(scope="module")
def broad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers whose activations are some 50 MB for a batch, as a small real model's are: what a run must hold."""
    return llama_folder(tmp_path_factory.mktemp("broad"), num_hidden_layers=2, intermediate_size=8192)


def peak(model: Path, folder: Path, samples: int, **disturbed: object) -> int:
    """Of a run over so many samples of 8 to 12 tokens."""
    rows = [{"id": f"s{i}", "input_ids": [1 + (i + j) % 250 for j in range(8 + i % 5)]} for i in range(samples)]
    data, out = write_rows(folder / f"{samples}.jsonl", rows), folder / f"out-{samples}"
    options = ("--batch-tokens", BATCH_TOKENS, "--compile", "off", "--quiet", "--out", out)
    found = peak_above_model("capture", "--model", model, "--data", data, "--layer-ids", "0,1", *options, **disturbed)
    assert len(CapturedDataset(out)) == samples
    return found


@pytest.mark.slow
def test_ten_thousand_samples_take_the_memory_of_a_hundred(broad: Path, tmp_path: Path) -> None:
    few, many = peak(broad, tmp_path, 100), peak(broad, tmp_path, 10_000)
    assert few > 40_000_000
    assert many < 1.1 * few, f"{few / 1e6:.1f} MB for 100 samples, {many / 1e6:.1f} MB for 10,000"


@pytest.mark.slow
def test_a_disk_slower_than_the_forward_takes_no_more_memory(broad: Path, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    fast = peak(broad, tmp_path, 600)
    slow = peak(broad, tmp_path / "slow", 600, place="slow_disk", given={"seconds": 0.05})
    assert slow < 1.1 * fast, f"{fast / 1e6:.1f} MB, {slow / 1e6:.1f} MB behind a slow disk"
