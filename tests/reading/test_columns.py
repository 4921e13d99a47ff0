"""Whole columns of the capture whose sample i repeats the id 10 + i."""

from collections import Counter
from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from hiddentap.capture.reading import whole_column
from hiddentap.models.errors import UsageError
from support.shards import write_shard

from .conftest import LENGTHS


def test_a_whole_column_holds_the_rows_of_all_shards(dataset: CapturedDataset) -> None:
    found = whole_column(dataset, "input_ids")
    assert Counter(found.tolist()) == Counter({10 + i: length for i, length in enumerate(LENGTHS)})


def test_an_unknown_column_and_a_capture_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not 'colour'"):
        whole_column(CapturedDataset(write_shard(tmp_path / "shard-000000.safetensors", 3).path), "colour")
    with pytest.raises(UsageError, match="holds no sample"):
        whole_column(
            CapturedDataset(write_shard(tmp_path / "shard-000001.safetensors", 3, rejected=(0,)).path), "input_ids"
        )
