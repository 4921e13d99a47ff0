"""Which rows are read, and that each comes once."""

from pathlib import Path

import numpy as np
import pytest

from hiddentap.capture.report import reading
from hiddentap.capture.report.reading import Place, chosen, chunks
from hiddentap.capture.store import OutputFolder


def _shards(path: Path) -> list:
    sealed = OutputFolder(path).sealed_shards().shards
    return [sealed[index] for index in sorted(sealed)]


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_every_row_comes_once_and_in_order_whatever_a_chunk_holds(make_folder, monkeypatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
    shards = _shards(make_folder())
    got = list(chunks(chosen(shards, 10_000)))
    ids = np.concatenate([chunk.columns["input_ids"].numpy() for chunk in got])
    np.testing.assert_array_equal(
        ids, np.concatenate([shard.rows("input_ids", 0, shard.R).numpy() for shard in shards])
    )
    lengths = [9, 20, 31, 14, 40, 25, 18, 33, 12, 27, 22, 36]
    np.testing.assert_array_equal(np.concatenate([chunk.sample for chunk in got]), np.repeat(np.arange(12), lengths))
    firsts = np.flatnonzero(np.concatenate([chunk.first for chunk in got]))
    assert firsts.tolist() == [0, 9, 29, 60, 74, 114, 139, 157, 190, 202, 229, 251]
    if chunk_bytes == 1:
        assert {len(chunk.sample) for chunk in got} == {1}


def test_a_large_folder_is_read_in_whole_samples_spread_evenly(make_folder) -> None:
    shards = _shards(make_folder())
    places = chosen(shards, 100)  # 287 rows: every third sample
    assert [place.sample_id for place in places] == ["s0", "s3", "s6", "s9"]
    got = list(chunks(places))
    np.testing.assert_array_equal(
        np.concatenate([chunk.sample for chunk in got]), np.repeat([0, 1, 2, 3], [9, 14, 18, 27])
    )


def test_shards_are_closed_once_they_are_read(make_folder) -> None:
    shards = _shards(make_folder())
    for _ in chunks(chosen(shards, 10_000)):
        pass
    assert all(shard._fd is None for shard in shards)
    assert Place(shards[1], 2).sample_id == "s8"
    assert shards[1]._fd is None
