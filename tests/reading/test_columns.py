"""Whole columns of the capture whose sample i repeats the id 10 + i."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset, PackedDataset
from hiddentap.capture.reading import whole_column
from hiddentap.capture.store import ShardError
from hiddentap.models.errors import UsageError
from support.damage import flip_bit
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


def test_a_checked_data_set_gives_no_column_and_no_pack_of_a_flipped_bit(out: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    whole = whole_column(CapturedDataset(copy), "pre_norm")
    assert torch.equal(whole_column(CapturedDataset(copy, check=True), "pre_norm"), whole)
    flip_bit(copy / "shards/shard-000001.safetensors", "pre_norm")
    checked = CapturedDataset(copy, check=True)
    with pytest.raises(ShardError, match=r"pre_norm of sample 's.*' does not match its checksum"):
        whole_column(checked, "pre_norm")
    with pytest.raises(ShardError, match=r"pre_norm of sample 's.*' does not match its checksum"):
        list(PackedDataset(checked, 40))
    assert not torch.equal(whole_column(CapturedDataset(copy), "pre_norm"), whole)
