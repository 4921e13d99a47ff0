"""Packs over a capture whose sample i repeats the id 10 + i, so that any row says whose it is."""

from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.utils.data import DataLoader

from hiddentap import CapturedDataset
from hiddentap.capture.reading import PackedDataset, PackLoader
from hiddentap.capture.reading.packs import pack_edges
from hiddentap.models.errors import UsageError

from .conftest import LENGTHS


def owners(pack: dict) -> list[int]:
    """Which samples a pack holds, told from its token ids alone."""
    return [int(id_) - 10 for id_, _ in groupby(pack["input_ids"].tolist())]


def read(dataset: CapturedDataset, budget: int = 40, workers: int = 0, **settings: Any) -> list[list[int]]:
    packs = PackedDataset(dataset, budget, **settings)
    return [owners(pack) for pack in DataLoader(packs, batch_size=None, num_workers=workers)]


def test_an_epoch_holds_every_sample_once_in_packs_within_the_budget(dataset: CapturedDataset) -> None:
    packs = read(dataset)
    assert sorted(i for pack in packs for i in pack) == list(range(40))
    assert all(sum(LENGTHS[i] for i in pack) <= 40 for pack in packs)


def test_a_pack_is_closed_only_where_the_next_sample_does_not_fit() -> None:
    assert pack_edges(np.array([3, 4, 3, 10, 1, 9, 1]), 10).tolist() == [0, 3, 4, 6, 7]
    assert pack_edges(np.array([], np.int64), 10).tolist() == [0]


def test_rows_of_a_pack_are_those_of_its_samples_end_to_end(dataset: CapturedDataset) -> None:
    pack = next(iter(PackedDataset(dataset, 60)))
    lengths = [LENGTHS[i] for i in owners(pack)]
    assert pack["segment_ids"].tolist() == [s for s, length in enumerate(lengths) for _ in range(length)]
    assert pack["position_ids"].tolist() == [t for length in lengths for t in range(length)]
    assert pack["sample_indices"].tolist() == owners(pack)
    assert pack["aux_hidden_states"].shape == (sum(lengths), 2, 32)


def test_the_states_of_a_row_are_the_stored_ones(dataset: CapturedDataset) -> None:
    stored = {}
    for path in sorted((dataset.path / "shards").iterdir()):
        with safe_open(path, framework="pt") as shard:
            offsets, states = shard.get_tensor("row_offsets"), shard.get_tensor("aux_hidden_states")
            for j, sample in enumerate(shard.get_tensor("sample_index").tolist()):
                stored[sample] = states[offsets[j] : offsets[j + 1]]
    for pack in PackedDataset(dataset, 60):
        for segment, sample in enumerate(owners(pack)):
            assert torch.equal(pack["aux_hidden_states"][pack["segment_ids"] == segment], stored[sample])


def test_one_seed_gives_one_order_and_another_seed_or_epoch_another(dataset: CapturedDataset) -> None:
    first = read(dataset, seed=1)
    assert first == read(dataset, seed=1)
    assert first != read(dataset, seed=2)
    later = PackedDataset(dataset, 40, seed=1)
    later.epoch = 1
    assert [owners(pack) for pack in later] != first


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (3, 0), (2, 2)])
def test_ranks_and_workers_share_the_samples_out_each_once(
    dataset: CapturedDataset, world_size: int, workers: int
) -> None:
    ranks = [
        read(dataset, workers=workers, rank=rank, world_size=world_size, uneven="keep") for rank in range(world_size)
    ]
    assert Counter(i for packs in ranks for pack in packs for i in pack) == Counter(range(40))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 40])
def test_every_rank_has_as_many_packs_and_the_first_ones_fill_up(dataset: CapturedDataset, world_size: int) -> None:
    whole = read(dataset)
    ranks = [read(dataset, rank=rank, world_size=world_size) for rank in range(world_size)]
    each = -(-len(whole) // world_size)
    assert {len(packs) for packs in ranks} == {each}
    in_turn = [ranks[number % world_size][number // world_size] for number in range(each * world_size)]
    assert in_turn[: len(whole)] == whole
    filled = in_turn[len(whole) :]
    assert filled == [whole[i % len(whole)] for i in range(len(filled))]


def test_packs_that_do_not_share_out_evenly_can_be_left_out(dataset: CapturedDataset) -> None:
    whole = read(dataset)
    world_size = next(w for w in range(2, 9) if len(whole) % w)
    ranks = [read(dataset, rank=rank, world_size=world_size, uneven="drop") for rank in range(world_size)]
    each = len(whole) // world_size
    assert {len(packs) for packs in ranks} == {each}
    assert sorted(pack for packs in ranks for pack in packs) == sorted(whole[: each * world_size])


def test_an_unknown_way_of_sharing_out_is_refused(dataset: CapturedDataset) -> None:
    with pytest.raises(UsageError, match="uneven must be one of pad, drop, keep; got 'wrap'"):
        PackedDataset(dataset, 40, uneven="wrap")  # type: ignore[arg-type]


@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
def test_the_length_is_the_number_of_packs_of_the_rank_in_its_epoch(dataset: CapturedDataset, uneven: Any) -> None:
    for epoch in range(3):
        for rank in range(3):
            packs = PackedDataset(dataset, 40, rank=rank, world_size=3, uneven=uneven)
            packs.epoch = epoch
            loader = PackLoader(packs)
            expected = len(list(packs))
            assert (len(packs), len(loader), len(DataLoader(packs, batch_size=None))) == (expected,) * 3
            assert len(list(loader)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_looking_into_a_loader_costs_no_pack(dataset: CapturedDataset, workers: int) -> None:
    expected = [owners(pack) for pack in PackedDataset(dataset, 40)]
    loader = PackLoader(PackedDataset(dataset, 40), num_workers=workers)
    assert owners(next(iter(loader))) == expected[0]
    for count, _ in enumerate(loader):
        if count == 2:
            break
    assert [owners(pack) for pack in loader] == expected
    assert loader.state_dict()["epoch"] == 1


def test_looking_into_a_resumed_loader_costs_no_pack_either(dataset: CapturedDataset) -> None:
    expected = [owners(pack) for pack in PackedDataset(dataset, 40)]
    loader = PackLoader(PackedDataset(dataset, 40))
    loader.load_state_dict({**loader.state_dict(), "first_pack": 3})
    assert loader.state_dict()["first_pack"] == 3
    assert owners(next(iter(loader))) == expected[3]
    assert [owners(pack) for pack in loader] == expected[3:]
    assert len(list(loader)) == len(loader)


def test_a_state_of_an_older_version_is_taken_by_packs_that_are_shared_out_alike(dataset: CapturedDataset) -> None:
    older = {k: v for k, v in PackLoader(PackedDataset(dataset, 40)).state_dict().items() if k != "uneven"}
    alone = PackLoader(PackedDataset(dataset, 40))
    alone.load_state_dict({**older, "first_pack": 2})
    assert alone.state_dict()["first_pack"] == 2
    of_two = {**older, "world_size": 2}
    PackLoader(PackedDataset(dataset, 40, world_size=2, uneven="keep")).load_state_dict(of_two)
    with pytest.raises(UsageError, match="uneven is pad, was keep"):
        PackLoader(PackedDataset(dataset, 40, world_size=2)).load_state_dict(of_two)


def test_the_number_of_workers_does_not_change_the_order(dataset: CapturedDataset) -> None:
    assert read(dataset, workers=2) == read(dataset, workers=0)


def test_reads_stay_within_the_shards_of_one_window(dataset: CapturedDataset) -> None:
    shards = {}
    for number, path in enumerate(sorted((dataset.path / "shards").iterdir())):
        with safe_open(path, framework="pt") as shard:
            shards |= dict.fromkeys(shard.get_tensor("sample_index").tolist(), number)
    assert len(set(shards.values())) >= 4
    order = [i for pack in read(dataset, window=5) for i in pack]
    visits = [shards[i] for i in order]
    # 40 samples in windows of 5: a shard is read in the windows that hold its samples and in no other.
    spans = [(min(w), max(w)) for s in set(visits) for w in [[k // 5 for k, v in enumerate(visits) if v == s]]]
    assert all(last - first <= (visits.count(s) + 3) // 5 for s, (first, last) in zip(set(visits), spans, strict=True))
    assert order != sorted(order)
    assert visits != sorted(visits)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_state_goes_on_with_exactly_the_rest_of_the_epoch_and_the_next(
    dataset: CapturedDataset, workers: int
) -> None:
    whole = PackLoader(PackedDataset(dataset, 40, seed=3))
    expected = [owners(pack) for _ in range(2) for pack in whole]
    stopped = PackLoader(PackedDataset(dataset, 40, seed=3), num_workers=workers)
    seen = []
    for pack in stopped:
        seen.append(owners(pack))
        if len(seen) == 4:
            state = stopped.state_dict()
            break
    going_on = PackLoader(PackedDataset(dataset, 40, seed=3), num_workers=workers)
    going_on.load_state_dict(state)
    seen += [owners(pack) for _ in range(2) for pack in going_on]
    assert seen == expected


def test_a_state_of_other_packs_is_refused_naming_what_differs(dataset: CapturedDataset) -> None:
    state = PackLoader(PackedDataset(dataset, 40)).state_dict()
    with pytest.raises(UsageError, match="token_budget is 50, was 40, seed is 1, was 0"):
        PackLoader(PackedDataset(dataset, 50, seed=1)).load_state_dict(state)


def test_a_sample_longer_than_the_budget_is_refused_by_number_and_length(dataset: CapturedDataset) -> None:
    with pytest.raises(UsageError, match="sample 8 has 21 rows and a pack takes 20"):
        PackedDataset(dataset, 20)


def test_a_rank_outside_the_world_is_refused(dataset: CapturedDataset) -> None:
    with pytest.raises(UsageError, match=r"rank must be one of 0\.\.1"):
        PackedDataset(dataset, 40, rank=2, world_size=2)
