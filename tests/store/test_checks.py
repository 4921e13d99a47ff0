"""Checks that need no model: what they find, and that they find nothing in a good folder."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch

from hiddentap.capture.store import (
    Column,
    GrowingShardWriter,
    Manifest,
    OutputFolder,
    PlannedShardWriter,
    check_folder,
    check_shard,
    checks,
    generation_columns,
)
from support.shards import COLUMNS, open_files, raw_header, rows_of, write_plan, write_shard


def make_folder(path: Path) -> OutputFolder:
    """Two shards of a plan of 3, 5 and 4 tokens; all finite, no two rows alike."""
    folder = OutputFolder(path)
    with folder.lock():
        plan = write_plan(folder.plan, 3, 5, 4, shard_rows=8)
        shards = []
        for planned in plan.shards:
            ids, mask = plan.tokens_of(planned)
            rows = {**rows_of(planned.R), "input_ids": ids, "loss_mask": mask}
            with PlannedShardWriter(
                folder.shard_path(planned.index), planned, plan.samples_of(planned), COLUMNS, {}
            ) as writer:
                writer.write(0, rows)
                shards.append(writer.seal())
        Manifest.from_shards({}, plan.summary(), shards, complete=True).write(folder.manifest_path)
    return folder


def flip(path: Path, tensor: str, byte: int) -> None:
    """Flip the lowest bit of one byte of a tensor in the file."""
    header, start = raw_header(path)
    data = bytearray(path.read_bytes())
    data[start + header[tensor]["data_offsets"][0] + byte] ^= 1
    path.write_bytes(data)


def test_nothing_is_found_in_a_good_folder(tmp_path: Path) -> None:
    assert check_folder(make_folder(tmp_path / "out").path) == []


@pytest.mark.parametrize("chunk", [16 << 20, 20, 1])
def test_a_flipped_bit_names_sample_and_tensor_whatever_the_chunk(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHUNK_BYTES", chunk)
    folder = make_folder(tmp_path / "out")
    flip(folder.shard_path(0), "aux_hidden_states", 3 * 16)  # the first byte of the fourth row, so of the second sample
    found = check_folder(folder.path, values=False)
    assert [(finding.sample_id, finding.tensor, finding.severity) for finding in found] == [
        ("s1", "aux_hidden_states", "error")
    ]
    assert "its bytes changed on disk" in found[0].what
    assert check_folder(folder.path, checksums=False, values=False) == []


@pytest.mark.parametrize("tensor", ["row_offsets", "sample_index", "sample_ids", "source_line", "checksums"])
def test_a_flipped_bit_in_one_of_our_own_tensors_is_found(tmp_path: Path, tensor: str) -> None:
    folder = make_folder(tmp_path / "out")
    flip(folder.shard_path(0), tensor, 0)
    found = check_folder(folder.path, values=False)
    assert [finding.severity for finding in found] == ["error"]
    assert f"{tensor} does not match its checksum" in found[0].what


def test_a_check_that_finds_a_broken_shard_leaves_no_file_open(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    flip(folder.shard_path(0), "row_offsets", 0)
    gc.collect()
    gc.disable()  # whatever is left to it keeps its files until it comes
    try:
        assert check_folder(folder.path, values=False)
        assert open_files(folder.path) == 0
    finally:
        gc.enable()


def test_ids_that_are_not_the_plan_s_are_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    plan = write_plan(tmp_path / "other", 3, 5, 4, shard_rows=8)
    planned = plan.shards[0]
    ids, mask = plan.tokens_of(planned)
    ids[4] += 1
    with PlannedShardWriter(folder.shard_path(0), planned, plan.samples_of(planned), COLUMNS, {}) as writer:
        writer.write(0, {**rows_of(8), "input_ids": ids, "loss_mask": mask})
        writer.seal()
    found = check_folder(folder.path)
    assert [(f.sample_id, f.tensor, f.what) for f in found] == [
        ("s1", "input_ids", "differs from the plan in 1 of its tokens, first at token 1")
    ]


def test_samples_that_are_not_the_plan_s_are_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    write_shard(folder.shard_path(1), 4)
    found = check_folder(folder.path)
    errors = [finding.what for finding in found if Path(finding.path).name == "shard-000001.safetensors"]
    assert errors[-1] == "its samples are not those that the plan has for shard-000001.safetensors"


def test_missing_truncated_and_stray_files_and_an_incomplete_capture_are_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    folder.shard_path(0).unlink()
    os.truncate(folder.shard_path(1), 300)
    (folder.shards / "shard-000005.safetensors.open").write_bytes(b"")
    record = json.loads(folder.manifest_path.read_text())
    del record["crc32"]  # as an earlier release wrote it
    folder.manifest_path.write_text(json.dumps({**record, "complete": False}))
    found = check_folder(folder.path)
    assert [(Path(f.path).name, f.severity, f.what.split(";")[0].split(":")[0]) for f in found] == [
        ("shard-000000.safetensors", "error", "missing"),
        ("shard-000001.safetensors", "error", "300 bytes"),
        ("manifest.json", "warning", "the capture is not complete"),
        ("shards", "warning", "1 planned shards are not there yet"),
        ("shard-000001.safetensors", "error", str(folder.shard_path(1))),
        ("shard-000005.safetensors.open", "warning", "left by a killed run"),
    ]


def test_a_sample_in_two_shards_is_found(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    with folder.lock():
        shards = [write_shard(folder.shard_path(index), *lengths) for index, lengths in enumerate([(3, 5), (3,)])]
        Manifest.from_shards({}, {}, shards, complete=True).write(folder.manifest_path)
    found = check_folder(folder.path)
    assert [finding.what for finding in found] == ["1 samples stand in more than one shard, or twice in one"]


def test_a_damaged_plan_and_a_missing_manifest_are_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    folder.manifest_path.unlink()
    flip(folder.plan / "input_ids.safetensors", "input_ids", 0)
    found = check_folder(folder.path)
    assert [(finding.severity, Path(finding.path).name) for finding in found][:2] == [
        ("error", "manifest.json"),
        ("error", "plan"),
    ]
    assert any("differs from the plan in 1 of its tokens" in finding.what for finding in found)


@pytest.mark.parametrize("chunk", [16 << 20, 24])
def test_non_finite_all_zero_and_repeated_rows_are_found_with_slot_and_token(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHUNK_BYTES", chunk)
    aux = (torch.arange(10 * 2 * 2, dtype=torch.float32) + 1).view(10, 2, 2).half()
    aux[3, 1, 0] = float("inf")  # sample b, token 0, slot 1
    aux[4, 0, 1] = float("nan")  # sample b, token 1, slot 0
    aux[8, 1] = 0  # sample c, token 0, slot 1
    aux[6] = aux[5]  # sample b, token 3 equals token 2
    aux[0] = 7
    aux[3, 0] = aux[2, 0]  # same values in one slot only: no repeat
    columns = (Column("aux_hidden_states", torch.float16, (2, 2)),)
    with GrowingShardWriter(tmp_path / "x.safetensors", columns, {}) as writer:
        for index, (start, stop) in enumerate([(0, 3), (3, 8), (8, 10)]):
            writer.append(writer.begin(index, "abc"[index]), {"aux_hidden_states": aux[start:stop]})
        shard = writer.seal()
    assert [(f.sample_id, f.severity, f.what) for f in check_shard(shard)] == [
        ("b", "error", "non-finite values in 1 of its tokens, first at token 1 at slot 0"),
        ("b", "error", "non-finite values in 1 of its tokens, first at token 0 at slot 1"),
        ("c", "error", "all-zero rows in 1 of its tokens, first at token 0 at slot 1"),
        ("b", "warning", "equal to the row before in 1 of its tokens, first at token 3"),
    ]
    assert check_shard(shard, values=False) == []


def test_the_last_row_of_a_sample_may_equal_the_first_of_the_next(tmp_path: Path) -> None:
    columns = (Column("pre_norm", torch.float32, (3,)),)
    with GrowingShardWriter(tmp_path / "x.safetensors", columns, {}) as writer:
        for index in range(2):
            writer.append(writer.begin(index, str(index)), {"pre_norm": torch.ones(1, 3)})
        assert check_shard(writer.seal()) == []


def test_columns_that_are_no_hidden_states_may_hold_zeros_and_flat_masks_are_summed(tmp_path: Path) -> None:
    columns = (Column("input_ids", torch.int32), *generation_columns(logprobs=True, sampling_masks=True))
    rows = {
        "input_ids": torch.zeros(2, dtype=torch.int32),
        "output_ids": torch.zeros(2, dtype=torch.int32),
        "logprobs": torch.zeros(2),
        "sampling_mask_lengths": torch.tensor([2, 1], dtype=torch.int32),
        "sampling_mask_ids": torch.tensor([4, 5, 6], dtype=torch.int32),
    }
    path = tmp_path / "x.safetensors"
    with GrowingShardWriter(path, columns, {}) as writer:
        for index in range(2):
            writer.append(writer.begin(index, f"s{index}"), rows)
        shard = writer.seal()
    assert check_shard(shard) == []
    flip(path, "sampling_mask_ids", 3 * 4)
    assert [(f.sample_id, f.tensor) for f in check_shard(shard)] == [("s1", "sampling_mask_ids")]
