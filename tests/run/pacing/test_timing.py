"""The dry run: which samples it times, in which batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiddentap import CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.data import Sample
from hiddentap.capture.run import estimate_run
from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine
from hiddentap.capture.run.pacing import timing
from hiddentap.capture.run.pacing.timing import KeptSamples
from support.model_folder import chat, write_rows


def sample(number: int, length: int) -> Sample:
    """One of so many tokens, its number in each of them."""
    return Sample(
        input_ids=np.full(length, number, np.int32),
        loss_mask=np.ones(length, np.uint8),
        mask_rule="all",
        sample_id=str(number),
        source="x",
        line=number,
        warnings=(),
    )


def kept(most: int, lengths: list[int]) -> KeptSamples:
    keeping = KeptSamples(most)
    assert len(list(keeping.keeping(sample(i, length) for i, length in enumerate(lengths)))) == len(lengths)
    return keeping


def test_all_samples_of_a_small_input_are_kept_in_order_of_length() -> None:
    keeping = kept(100, [5, 3, 4])
    samples = keeping.in_order(None)
    assert (list(samples.ids), samples.row_offsets.tolist()) == (["1", "2", "0"], [0, 3, 7, 12])
    assert samples.input_ids.tolist() == [1] * 3 + [2] * 4 + [0] * 5
    assert (keeping.longest, keeping.have_images) == (5, False)


def test_of_a_large_input_evenly_spaced_samples_are_kept_and_at_least_half_of_the_rows_asked_for() -> None:
    keeping = kept(1000, [10] * 10_000)
    samples = keeping.in_order(None)
    places = np.array([int(i) for i in samples.ids])
    assert 500 <= samples.row_offsets[-1] <= 1000
    assert set(np.diff(np.sort(places))) == {128}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The lengths of the samples of each batch that a model runs."""
    forward, seen = HuggingFaceEngine.forward, []

    def noted(self: HuggingFaceEngine, batch: Any) -> Any:
        seen.append(batch.positions.lengths)
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceEngine, "forward", noted)
    return seen


@pytest.mark.parametrize(
    ("how", "largest"),
    [({"exact": True}, 50), ({"batch_tokens": 700}, 700), ({}, 4050)],
    ids=["exact", "a size that was given", "sizes tried out"],
)
def test_the_dry_run_times_batches_as_large_as_the_runs(
    how: dict[str, Any],
    largest: int,
    batches: list[tuple[int, ...]],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples of 50 tokens; of the sizes that a CPU tries, 4096 holds 81 of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "SECONDS", 300.0)
    rows = [{"id": f"{i}", "input_ids": [1 + (i + j) % 250 for j in range(50)]} for i in range(200)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = CaptureSettings(ModelSource(str(llama)), (str(data),), tmp_path / "out", layer_ids=(0, 2), **how)
    assert estimate_run(settings).tokens_per_second > 0
    dry = [sum(lengths) for lengths in batches]
    assert sum(dry) >= 2 * 200 * 50
    batches.clear()
    capture_dataset(settings)
    assert max(dry) == max(sum(lengths) for lengths in batches) == largest


def test_the_trial_begins_in_the_middle_and_spreads_over_all_rows() -> None:
    samples = kept(10**6, [10] * 1000).in_order(None)
    starts: Iterator[int] = timing._starts(samples)
    first = [next(starts) for _ in range(64)]
    assert first[:3] == [500, 250, 750]
    assert max(np.diff(sorted(first))) <= 32


def test_a_trial_ends_in_time_and_an_input_without_samples_has_no_speed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    rows = write_rows(tmp_path / "rows.jsonl", [chat("q", "a" * 50, id=f"{i}") for i in range(50)])
    settings = CaptureSettings(ModelSource(str(llama)), (str(rows),), tmp_path / "out", layer_ids=(0,), exact=True)
    assert estimate_run(settings).tokens_per_second > 0
    assert len(batches) == 2  # the first warms up
    empty = write_rows(tmp_path / "empty.jsonl", [])
    settings = CaptureSettings(ModelSource(str(llama)), (str(empty),), tmp_path / "out", layer_ids=(0,))
    assert estimate_run(settings).tokens_per_second == 0
