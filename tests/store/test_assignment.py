"""Which samples share a shard."""

import random
import subprocess
import sys

import pytest

from hiddentap.capture.store import plan_shards, shard_index, shard_name
from hiddentap.models.errors import UsageError


def by_hand(lengths: list[int], shard_rows: int) -> list[list[int]]:
    """Consecutive chunks of at most shard_rows rows, each ordered by length and then input order."""
    chunks: list[list[int]] = []
    rows = 0
    for i, length in enumerate(lengths):
        if not chunks or rows + length > shard_rows:
            chunks.append([])
            rows = 0
        chunks[-1].append(i)
        rows += length
    return [sorted(chunk, key=lambda i: (lengths[i], i)) for chunk in chunks]


def test_samples_are_cut_in_input_order_and_sorted_by_length_inside() -> None:
    shards = plan_shards([3, 5, 2, 4, 11, 1, 1], 10)
    assert [shard.sample_index.tolist() for shard in shards] == [[2, 0, 1], [3], [4], [5, 6]]
    assert [shard.row_offsets.tolist() for shard in shards] == [[0, 2, 5, 10], [0, 4], [0, 11], [0, 1, 2]]
    assert [shard.lengths.tolist() for shard in shards] == [[2, 3, 5], [4], [11], [1, 1]]
    assert [(shard.index, shard.M, shard.R) for shard in shards] == [(0, 3, 10), (1, 1, 4), (2, 1, 11), (3, 2, 2)]
    assert shards[-1].name == "shard-000003.safetensors"


def test_random_lengths_are_assigned_as_by_hand_and_every_sample_once() -> None:
    choose = random.Random(0)
    for _ in range(50):
        lengths = [choose.choice([1, 2, 3, 7, 30]) for _ in range(choose.randrange(1, 60))]
        shard_rows = choose.randrange(1, 40)
        found = [shard.sample_index.tolist() for shard in plan_shards(lengths, shard_rows)]
        assert found == by_hand(lengths, shard_rows)


def test_no_samples_make_no_shards_and_an_index_outside_is_an_error() -> None:
    assert len(plan_shards([], 10)) == 0
    shards = plan_shards([1, 2], 2)
    assert [shard.index for shard in shards[0:5]] == [0, 1]
    with pytest.raises(IndexError, match="the plan has 2 shards, got 2"):
        shards[2]


@pytest.mark.parametrize(("lengths", "shard_rows"), [([1], 0), ([0], 5)])
def test_empty_samples_and_empty_shards_are_refused(lengths: list[int], shard_rows: int) -> None:
    with pytest.raises(UsageError):
        plan_shards(lengths, shard_rows)[0]


def test_names_and_indices_of_shards_are_each_other_s_inverse() -> None:
    assert [shard_name(i) for i in (0, 1_234_567)] == ["shard-000000.safetensors", "shard-1234567.safetensors"]
    assert [
        shard_index(name)
        for name in ("shard-000012.safetensors", "shard-12.safetensors", "shard-000012.safetensors.open")
    ] == [12, None, None]


MEASURE = """
import numpy as np
from hiddentap.capture.store import plan_shards
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
lengths = np.random.default_rng(0).integers(1, 400, 10_000_000, dtype=np.int32)
before = peak()
rows = sum(shard.R for shard in plan_shards(lengths, 262_144))
print(rows == int(lengths.sum()), peak() - before)
"""


def test_ten_million_samples_take_at_most_16_bytes_each() -> None:
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    whole, taken = result.stdout.split()
    assert whole == "True"
    assert int(taken) < 16 * 10_000_000
