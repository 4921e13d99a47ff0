"""Captured samples as a torch dataset."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hiddentap.capture.store import (
    CapturedDataset,
    Column,
    GrowingShardWriter,
    Manifest,
    OutputFolder,
    PlannedShardWriter,
    PlanWriter,
    ShardError,
    capture_columns,
    generation_columns,
    sample_places,
)
from hiddentap.models.errors import RunError, UsageError
from support.damage import flip_bit
from support.shards import open_files, write_shard

K, H = 2, 3
LENGTHS = [3, 5, 2, 4, 1, 6]
REJECTED = "s2"


def make_folder(path: Path, *, complete: bool = True, ids: list[str] | None = None) -> Path:
    """Six samples in shards of at most 8 rows; token t of sample i has id 10 i + t and hidden states full of that."""
    folder = OutputFolder(path)
    ids = ids or [f"s{i}" for i in range(len(LENGTHS))]
    with folder.lock(), PlanWriter(folder.plan) as plan_writer:
        for i, length in enumerate(LENGTHS):
            plan_writer.add(range(10 * i, 10 * i + length), [1] * length, sample_id=ids[i], source=i % 2, line=i + 1)
        plan = plan_writer.seal({}, ["even", "odd"], shard_rows=8)
        shards = []
        for planned in plan.shards:
            input_ids, mask = plan.tokens_of(planned)
            hidden = input_ids.bfloat16()
            samples = plan.samples_of(planned)
            with PlannedShardWriter(
                folder.shard_path(planned.index),
                planned,
                samples,
                capture_columns(K, H, torch.bfloat16, pre_norm=True),
                {"n": 2},
            ) as writer:
                writer.write(0, {"input_ids": input_ids, "loss_mask": mask})
                writer.write(0, {"aux_hidden_states": hidden[:, None, None].expand(-1, K, H)})
                writer.write(0, {"pre_norm": -hidden[:, None].expand(-1, H)})
                for position in range(planned.M):
                    if samples.id(position) == REJECTED:
                        writer.reject(position, "bad")
                shards.append(writer.seal())
        Manifest.from_shards({}, plan.summary(), shards, complete=complete).write(folder.manifest_path)
    return path


def test_items_are_dense_in_input_order_and_rejected_samples_are_absent(tmp_path: Path) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out"))
    assert len(data) == 5
    assert data.lengths.tolist() == [3, 5, 4, 1, 6]
    assert [data[i]["sample_id"] for i in range(5)] == ["s0", "s1", "s3", "s4", "s5"]
    item = data[2]
    assert item["input_ids"].dtype == torch.int64
    assert item["input_ids"].tolist() == [30, 31, 32, 33]
    assert item["loss_mask"].tolist() == [1, 1, 1, 1]
    assert item["loss_mask"].dtype == torch.uint8
    assert item["aux_hidden_states"].shape == (4, 2, 3)
    assert item["aux_hidden_states"].dtype == torch.bfloat16
    assert item["aux_hidden_states"][:, 1, 2].tolist() == [30, 31, 32, 33]
    assert item["pre_norm"][:, 0].tolist() == [-30, -31, -32, -33]
    assert (item["source"], item["line"]) == ("odd", 4)
    assert data.metadata == {"n": 2}


def test_indices_behave_as_a_sequence_s(tmp_path: Path) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out"))
    assert data[-1]["sample_id"] == "s5"
    assert data[-5]["sample_id"] == "s0"
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"has 5 captured samples, got {index}"):
            data[index]


def test_an_id_finds_its_index_and_a_repeated_or_unknown_one_is_an_error(tmp_path: Path) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out", ids=["a", "b", "s2", "b", "é" * 300, ""]))
    assert [data.index_of(name) for name in ("a", "é" * 300, "")] == [0, 3, 4]
    with pytest.raises(UsageError, match=r"2 samples have the id 'b': \[1, 2\]; use their indices"):
        data.index_of("b")
    with pytest.raises(KeyError, match="s2"):
        data.index_of("s2")


def test_a_batch_is_padded_on_the_right_with_its_lengths(tmp_path: Path) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out"))
    batch = CapturedDataset.collate([data[0], data[3], data[2]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0], [40, 0, 0, 0], [30, 31, 32, 33]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch["lengths"].tolist() == [3, 1, 4]
    assert batch["aux_hidden_states"].shape == (3, 4, 2, 3)
    assert batch["aux_hidden_states"][:, :, 0, 0].tolist() == [[0, 1, 2, 0], [40, 0, 0, 0], [30, 31, 32, 33]]
    assert batch["sample_id"] == ["s0", "s4", "s3"]


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_loader_workers_read_the_same_items(tmp_path: Path, method: str, workers: int) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out"))
    assert data.index_of("s1") == 1
    loader = DataLoader(
        data, batch_size=2, num_workers=workers, multiprocessing_context=method, collate_fn=CapturedDataset.collate
    )
    seen = [
        (name, ids[:length].tolist())
        for batch in loader
        for name, ids, length in zip(batch["sample_id"], batch["input_ids"], batch["lengths"], strict=True)
    ]
    assert seen == [
        ("s0", [0, 1, 2]),
        ("s1", [10, 11, 12, 13, 14]),
        ("s3", [30, 31, 32, 33]),
        ("s4", [40]),
        ("s5", [50, 51, 52, 53, 54, 55]),
    ]


def test_an_id_is_found_in_another_process_whose_hashes_differ(tmp_path: Path) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out"))
    assert data.index_of("s3") == 2
    (tmp_path / "pickled").write_bytes(pickle.dumps(data))
    look = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).index_of('s3'))"
    command = [sys.executable, "-c", look, str(tmp_path / "pickled")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2\n"


def test_an_incomplete_capture_is_refused_unless_asked_for(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "out", complete=False)
    with pytest.raises(RunError, match=r"is not complete \(5 samples so far\).*allow_incomplete=True"):
        CapturedDataset(out)
    OutputFolder(out).manifest_path.unlink()
    OutputFolder(out).shard_path(0).unlink()
    data = CapturedDataset(out, allow_incomplete=True)
    assert [data[i]["sample_id"] for i in range(len(data))] == ["s3", "s4", "s5"]
    with pytest.raises(RunError, match="is no manifest"):
        CapturedDataset(out)


@pytest.mark.parametrize("allow_incomplete", [False, True])
def test_a_path_without_a_capture_is_refused(tmp_path: Path, allow_incomplete: bool) -> None:
    with pytest.raises(UsageError, match="nowhere is not there; expected the folder of a capture"):
        CapturedDataset(tmp_path / "nowhere", allow_incomplete=allow_incomplete)
    with pytest.raises(UsageError, match="holds no captured shards"):
        CapturedDataset(tmp_path, allow_incomplete=allow_incomplete)


def test_an_incomplete_capture_says_how_many_samples_are_sealed_and_how_to_go_on(tmp_path: Path) -> None:
    folder = OutputFolder(make_folder(tmp_path / "out", complete=False))
    identity = Manifest.read(folder.manifest_path).identity
    # As a run leaves it: the manifest is written before the first shard is sealed.
    Manifest.from_shards(identity, {}, [], complete=False).write(folder.manifest_path)
    with pytest.raises(RunError, match=r"\(5 samples so far\)\. Finish it by running it again\. Or pass"):
        CapturedDataset(folder.path)
    Manifest.from_shards({"mode": "generation"}, {}, [], complete=False).write(folder.manifest_path)
    text = r"\(5 samples so far\)\. A generation cannot be resumed: run it again into an empty folder\. Or pass"
    with pytest.raises(RunError, match=text):
        CapturedDataset(folder.path)


def test_a_damaged_or_missing_shard_of_a_complete_capture_is_an_error(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "out")
    path = OutputFolder(out).shard_path(0)
    os.truncate(path, path.stat().st_size - 1)
    for allow_incomplete in (False, True):
        with pytest.raises(ShardError, match=r"shard-000000.safetensors: truncated"):
            CapturedDataset(out, allow_incomplete=allow_incomplete)
    path.unlink()
    with pytest.raises(ShardError, match=r"shard-000000.safetensors: cannot be opened"):
        CapturedDataset(out)


def test_a_single_shard_file_is_a_dataset_of_its_own(tmp_path: Path) -> None:
    write_shard(tmp_path / "one.safetensors", 3, 1, 2)
    data = CapturedDataset(tmp_path / "one.safetensors")
    assert [data[i]["sample_id"] for i in range(3)] == ["s0", "s1", "s2"]
    assert data[0]["input_ids"].tolist() == [103, 104, 105]


def test_few_files_stay_open_and_every_item_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_places, "OPEN_FILES", 1)
    data = CapturedDataset(make_folder(tmp_path / "out"))
    assert open_files(tmp_path) == 0
    for _ in range(2):
        assert [data[i]["input_ids"][0].item() for i in range(5)] == [0, 10, 30, 40, 50]
    assert open_files(tmp_path) == 1


@pytest.mark.parametrize("column", ["aux_hidden_states", "pre_norm", "input_ids", "loss_mask"])
def test_a_bit_that_flipped_after_the_seal_is_found_when_its_sample_is_read_with_check(
    column: str, tmp_path: Path
) -> None:
    out = make_folder(tmp_path / "out")
    flip_bit(out / "shards/shard-000000.safetensors", column)  # of its first sample, the shorter one: s0
    checked = CapturedDataset(out, check=True)
    with pytest.raises(ShardError, match=f"{column} of sample 's0' does not match its checksum"):
        checked[0]
    assert [checked[i]["sample_id"] for i in range(1, 5)] == ["s1", "s3", "s4", "s5"]
    assert CapturedDataset(out)[0]["sample_id"] == "s0"


def test_a_shard_file_alone_and_loader_workers_check_too(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "out")
    path = out / "shards/shard-000000.safetensors"
    assert len(list(DataLoader(CapturedDataset(out, check=True), batch_size=None, num_workers=1))) == 5
    flip_bit(path, "aux_hidden_states")
    with pytest.raises(ShardError, match="'s0' does not match"):
        CapturedDataset(path, check=True)[0]
    with pytest.raises(ShardError, match="'s0' does not match"):
        list(DataLoader(CapturedDataset(out, check=True), batch_size=None, num_workers=1))


def test_changing_an_item_changes_nothing_stored(tmp_path: Path) -> None:
    data = CapturedDataset(make_folder(tmp_path / "out"))
    data[0]["aux_hidden_states"].fill_(9)
    assert data[0]["aux_hidden_states"][:, 0, 0].tolist() == [0, 1, 2]


def test_grown_shards_give_their_generation_columns_too(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    columns = (Column("input_ids", torch.int32), *generation_columns(sampling_masks=True))
    with folder.lock(), GrowingShardWriter(folder.shard_path(0), columns, {}) as writer:
        for index, length in ((1, 1), (0, 2)):
            writer.append(
                writer.begin(index, f"p{index}"),
                {
                    "input_ids": torch.arange(length, dtype=torch.int32),
                    "output_ids": torch.full((length,), 7, dtype=torch.int32),
                    "sampling_mask_lengths": torch.full((length,), 2, dtype=torch.int32),
                    "sampling_mask_ids": torch.arange(2 * length, dtype=torch.int32),
                },
            )
        Manifest.from_shards({}, {}, [writer.seal()], complete=True).write(folder.manifest_path)
    data = CapturedDataset(folder.path)
    assert [data[i]["sample_id"] for i in range(2)] == ["p0", "p1"]
    assert data[0]["sampling_mask_ids"].tolist() == [0, 1, 2, 3]
    batch = CapturedDataset.collate([data[0], data[1]])
    assert batch["output_ids"].tolist() == [[7, 7], [7, -1]]
    assert batch["sampling_mask_lengths"].tolist() == [[2, 2], [2, -1]]
    assert [ids.tolist() for ids in batch["sampling_mask_ids"]] == [[0, 1, 2, 3], [0, 1]]
