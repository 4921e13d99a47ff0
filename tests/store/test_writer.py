"""Planned shards: what ends in the file, what is refused, what the folder looks like before and after."""

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open

from hiddentap.capture.store import Column, PlannedShardWriter, ShardSamples, plan_shards
from hiddentap.capture.store.rows import column_bytes
from hiddentap.models.errors import RunError, UsageError
from support.shards import COLUMNS, names, planned, raw_header, raw_tensor_bytes, rows_of, write_shard

NAME = "shard-000000.safetensors"


def test_the_public_library_reads_literal_values_back(tmp_path: Path) -> None:
    shard, samples = planned(3, 1)
    columns = (Column("aux_hidden_states", torch.bfloat16, (1, 2)), Column("input_ids", torch.int32))
    aux = torch.tensor([[[1.0, 2.0]], [[3.0, -0.0]], [[float("inf"), 5.5]], [[7.0, 8.0]]], dtype=torch.bfloat16)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, columns, {"n": 30}) as writer:
        writer.write(0, {"aux_hidden_states": aux, "input_ids": torch.tensor([9, 5, 6, 7], dtype=torch.int32)})
        writer.seal()
    with safe_open(tmp_path / NAME, "pt") as file:
        stored = file.get_tensor("aux_hidden_states")
        assert stored.dtype == torch.bfloat16
        assert stored.view(torch.int16).tolist() == [
            [[0x3F80, 0x4000]],
            [[0x4040, -0x8000]],
            [[0x7F80, 0x40B0]],
            [[0x40E0, 0x4100]],
        ]
        assert file.get_tensor("input_ids").tolist() == [9, 5, 6, 7]
        assert file.get_tensor("row_offsets").tolist() == [0, 1, 4]
        assert file.get_tensor("sample_index").tolist() == [1, 0]
        assert bytes(file.get_tensor("sample_ids").tolist()) == b"s1s0"
        assert file.get_tensor("source_line").tolist() == [2, 1]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
        torch.int16,
        torch.uint16,
    ],
)
def test_every_stored_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    shard, samples = planned(2)
    raw = torch.tensor([[0, 1, 0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0, 0, 1]], dtype=torch.uint8)
    value = raw.view(dtype)
    with PlannedShardWriter(
        tmp_path / NAME, shard, samples, [Column("x", dtype, tuple(value.shape[1:]))], {}
    ) as writer:
        writer.write(0, {"x": value})
        reader = writer.seal()
    assert raw_tensor_bytes(tmp_path / NAME, "x") == bytes(raw.flatten().tolist())
    assert reader.rows("x", 0, 2).dtype == dtype
    assert reader.rows("x", 1, 2).view(torch.uint8).tolist() == raw[1:].tolist()


def test_tensors_are_aligned_and_the_data_starts_at_a_multiple_of_64(tmp_path: Path) -> None:
    write_shard(tmp_path / NAME, 3, 5, 2)
    header, start = raw_header(tmp_path / NAME)
    widths = {"I64": 8, "I32": 4, "U32": 4, "BF16": 2, "U8": 1}
    assert start % 64 == 0
    for name in header.keys() - {"__metadata__"}:
        assert (start + header[name]["data_offsets"][0]) % widths[header[name]["dtype"]] == 0, name


def test_all_metadata_is_one_key_of_sorted_json(tmp_path: Path) -> None:
    write_shard(tmp_path / NAME, 3)
    header, _ = raw_header(tmp_path / NAME)
    assert list(header["__metadata__"]) == ["hiddentap"]
    text = header["__metadata__"]["hiddentap"]
    record = json.loads(text)
    assert text == json.dumps(record, sort_keys=True, separators=(",", ":"))
    assert record["metadata"] == {"model": "m"}
    assert record["format_version"] == 1


def test_order_and_grouping_of_writes_change_no_byte(tmp_path: Path) -> None:
    shard, samples = planned(3, 5, 2)
    rows = rows_of(10)
    write_shard(tmp_path / "a.safetensors", 3, 5, 2)
    with PlannedShardWriter(tmp_path / "b.safetensors", shard, samples, COLUMNS, {"model": "m"}) as writer:
        for start, stop in ((7, 10), (0, 1), (4, 7), (1, 4)):
            for name, tensor in rows.items():
                writer.write(start, {name: tensor[start:stop]})
        writer.seal()
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_an_unsealed_shard_is_refused_by_the_public_library_and_has_its_full_size(tmp_path: Path) -> None:
    shard, samples = planned(3, 5)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer:
        writer.write(0, rows_of(8))
        unsealed = tmp_path / f"{NAME}.open"
        reserved = unsealed.stat().st_size
        with pytest.raises(SafetensorError), safe_open(unsealed, "pt"):
            pass
        assert not (tmp_path / NAME).exists()
        writer.seal()
    assert (tmp_path / NAME).stat().st_size == reserved
    assert names(tmp_path) == [NAME]


def test_leaving_without_a_seal_leaves_no_file(tmp_path: Path) -> None:
    shard, samples = planned(3)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer:
        writer.write(0, rows_of(3))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("start", "rows", "message"),
    [
        (
            0,
            {"pre_norm": torch.zeros(2, 4)},
            r"pre_norm, rows 0:2 of .*expected dtype torch.bfloat16, found torch.float32",
        ),
        (0, {"pre_norm": torch.zeros(2, 5).bfloat16()}, r"pre_norm, rows 0:2.*expected shape \(n, 4\), found \(2, 5\)"),
        (0, {"pre_norm": torch.zeros(4).bfloat16()}, r"pre_norm, rows 0:4.*expected shape \(n, 4\), found \(4,\)"),
        (
            7,
            {"input_ids": torch.zeros(2, dtype=torch.int32)},
            r"input_ids, rows 7:9.*outside the shard, which has rows 0:8",
        ),
        (-1, {"input_ids": torch.zeros(2, dtype=torch.int32)}, r"input_ids, rows -1:1.*outside the shard"),
        (3, {"input_ids": torch.zeros(3, dtype=torch.int32)}, r"input_ids, rows 3:6.*row 5 is written already"),
        (0, {"logits": torch.zeros(2)}, r"has columns \['aux_hidden_states', .*not 'logits'"),
        (
            0,
            {"pre_norm": torch.zeros(2, 4, dtype=torch.bfloat16, device="meta")},
            "expected a dense CPU tensor, found meta",
        ),
    ],
)
def test_wrong_rows_are_refused_by_name_and_nothing_of_the_call_is_written(
    tmp_path: Path, start: int, rows: dict[str, torch.Tensor], message: str
) -> None:
    shard, samples = planned(3, 5)
    good = rows_of(8)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer:
        writer.write(5, {"input_ids": good["input_ids"][5:6]})
        before = (tmp_path / f"{NAME}.open").read_bytes()
        with pytest.raises(UsageError, match=message):
            writer.write(start, {"loss_mask": torch.ones(1, dtype=torch.uint8), **rows} if start >= 0 else rows)
        assert (tmp_path / f"{NAME}.open").read_bytes() == before


def test_a_seal_with_missing_rows_names_column_and_sample_and_seals_nothing(tmp_path: Path) -> None:
    shard, samples = planned(3, 5)
    rows = rows_of(8)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer:
        writer.write(0, {name: rows[name] for name in ("aux_hidden_states", "input_ids", "loss_mask")})
        writer.write(0, {"pre_norm": rows["pre_norm"][:6]})
        with pytest.raises(RunError, match="pre_norm of sample 's1': 2 rows"):
            writer.seal()
        assert not (tmp_path / NAME).exists()
        writer.write(6, {"pre_norm": rows["pre_norm"][6:]})
        writer.seal()
    assert (tmp_path / NAME).exists()


def test_rejected_samples_are_absent_whether_written_partly_or_not_at_all(tmp_path: Path) -> None:
    shard, samples = planned(2, 3, 4, 5)
    rows = rows_of(14)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {"model": "m"}) as writer:
        writer.write(0, {name: tensor[0:3] for name, tensor in rows.items()})  # all of s0, one row of s1
        writer.write(9, {name: tensor[9:14] for name, tensor in rows.items()})  # all of s3
        writer.reject(1, "non-finite", {"layer": 2, "token": 1})
        writer.reject(2, "non-finite")
        reader = writer.seal()
    with safe_open(tmp_path / NAME, "pt") as file:
        assert file.get_tensor("row_offsets").tolist() == [0, 2, 7]
        assert file.get_tensor("sample_index").tolist() == [0, 3]
        assert file.get_tensor("input_ids").tolist() == [100, 101, 109, 110, 111, 112, 113]
        kept = torch.tensor([0, 1, 9, 10, 11, 12, 13])
        assert torch.equal(file.get_tensor("aux_hidden_states"), rows["aux_hidden_states"][kept])
        assert torch.equal(file.get_tensor("pre_norm"), rows["pre_norm"][kept])
    assert [reject.as_json() for reject in reader.rejects] == [
        {
            "source": "data.jsonl",
            "line": 2,
            "id": "s1",
            "reason": "non-finite",
            "detail": {"layer": 2, "token": 1},
            "sample_index": 1,
        },
        {"source": "data.jsonl", "line": 3, "id": "s2", "reason": "non-finite", "sample_index": 2},
    ]
    assert names(tmp_path) == [NAME]


def test_a_shard_of_rejects_alone_is_sealed_empty(tmp_path: Path) -> None:
    reader = write_shard(tmp_path / NAME, 2, 3, rejected=(0, 1))
    assert (reader.M, reader.R, len(reader.rejects)) == (0, 0, 2)
    with safe_open(tmp_path / NAME, "pt") as file:
        assert tuple(file.get_tensor("aux_hidden_states").shape) == (0, 2, 4)


@pytest.mark.parametrize("pieces", [((2, 5), (0, 2), (5, 8)), ((0, 3), (3, 5), (5, 8)), ((5, 8), (0, 5))])
def test_checksums_are_the_crc32_of_each_sample_s_bytes_whatever_pieces_its_rows_came_in(
    tmp_path: Path, pieces: tuple[tuple[int, int], ...]
) -> None:
    shard, samples = planned(3, 5)
    rows = rows_of(8)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer:
        for start, stop in pieces:
            writer.write(start, {name: tensor[start:stop] for name, tensor in rows.items()})
        writer.seal()
    stored = np.frombuffer(raw_tensor_bytes(tmp_path / NAME, "checksums"), "<u4").reshape(2, 4)
    for place, name in enumerate(("aux_hidden_states", "input_ids", "loss_mask", "pre_norm")):
        data = rows[name].view(torch.uint8).flatten().numpy().tobytes()
        step = len(data) // 8
        assert stored[:, place].tolist() == [zlib.crc32(data[: 3 * step]), zlib.crc32(data[3 * step :])]


def test_row_ranges_and_column_views_of_one_tensor_give_exact_shapes_and_stay_as_they_were(tmp_path: Path) -> None:
    H = 4
    batch = torch.arange(10 * 2 * H, dtype=torch.float32).view(10, 2 * H)
    literal = batch.tolist()
    columns = (Column("pre_norm", torch.float32, (H,)), Column("post_norm", torch.float32, (H,)))
    shard = plan_shards([2, 3, 5], 100)[0]
    samples = ShardSamples.of((i, f"s{i}", "a", i + 1) for i in range(3))
    cuts = [(8, 10), (0, 3), (3, 8)]  # the samples of 2, 3 and 5 rows
    with PlannedShardWriter(tmp_path / NAME, shard, samples, columns, {}) as writer:
        for position, (start, stop) in enumerate(cuts):
            rows = batch[start:stop]
            writer.write(int(shard.row_offsets[position]), {"pre_norm": rows[:, :H], "post_norm": rows[:, H:]})
        batch.fill_(-1)
        reader = writer.seal()
    order = [8, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    expected = np.array([literal[r] for r in order], "<f4")
    assert raw_tensor_bytes(tmp_path / NAME, "pre_norm") == expected[:, :H].tobytes()
    assert raw_tensor_bytes(tmp_path / NAME, "post_norm") == expected[:, H:].tobytes()
    assert [tuple(reader.sample(j)["pre_norm"].shape) for j in range(3)] == [(2, 4), (3, 4), (5, 4)]
    header, start = raw_header(tmp_path / NAME)
    tensors = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert (tmp_path / NAME).stat().st_size == start + max(tensors)


def test_contiguous_memory_is_written_without_a_copy() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(4, 3).bfloat16()
    column = Column("x", torch.bfloat16, (3,))
    data = np.frombuffer(column_bytes(column, tensor[1:3], "rows"), np.uint8)
    assert np.shares_memory(data, tensor.view(torch.uint8).numpy())


def test_a_lazily_negated_tensor_is_stored_negated(tmp_path: Path) -> None:
    negated = torch._neg_view(torch.ones(2, 1))
    shard, samples = planned(2)
    with PlannedShardWriter(tmp_path / NAME, shard, samples, [Column("x", torch.float32, (1,))], {}) as writer:
        writer.write(0, {"x": negated})
        writer.seal()
    assert np.frombuffer(raw_tensor_bytes(tmp_path / NAME, "x"), "<f4").tolist() == [-1.0, -1.0]


def test_tensors_of_inference_and_of_training_are_written_as_they_are(tmp_path: Path) -> None:
    shard, samples = planned(2)
    with torch.inference_mode():
        inferred = torch.tensor([[1.5], [2.5]])
    trained = torch.tensor([[3.5], [4.5]], requires_grad=True)
    columns = [Column("x", torch.float32, (1,)), Column("y", torch.float32, (1,))]
    with PlannedShardWriter(tmp_path / NAME, shard, samples, columns, {}) as writer:
        writer.write(0, {"x": inferred, "y": trained})
        reader = writer.seal()
    assert (reader.rows("x", 0, 2).tolist(), reader.rows("y", 0, 2).tolist()) == ([[1.5], [2.5]], [[3.5], [4.5]])


def test_a_shard_in_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none/shard-000000.safetensors.open cannot be created"):
        write_shard(tmp_path / "none" / NAME, 3)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_a_sealed_shard_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_shard(tmp_path / NAME, 3)
        write_shard(tmp_path / "shard-000001.safetensors", 3, 2, rejected=(0,))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())] == [mode, mode]


def test_a_second_writer_of_the_same_shard_is_refused(tmp_path: Path) -> None:
    shard, samples = planned(3)
    with (
        PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {}) as writer,
        pytest.raises(RunError, match=r"shard-000000.safetensors.open exists"),
    ):
        PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, {})
    with pytest.raises(RunError, match="is closed"):
        writer.write(0, rows_of(3))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({"a": float("nan")}, "must be JSON"), ({"a": {1, 2}}, "must be JSON"), ({"a": torch.float32}, "must be JSON")],
)
def test_metadata_that_is_no_json_is_refused_before_a_file_exists(
    tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    shard, samples = planned(3)
    with pytest.raises(UsageError, match=message):
        PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, metadata)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["row_offsets", "checksums"])
def test_a_column_may_not_take_the_name_of_one_of_ours(tmp_path: Path, name: str) -> None:
    shard, samples = planned(3)
    with pytest.raises(UsageError, match="column names must be unique"):
        PlannedShardWriter(tmp_path / NAME, shard, samples, [Column(name, torch.int32)], {})


def test_metadata_that_imitates_our_header_checksum_does_no_harm(tmp_path: Path) -> None:
    shard, samples = planned(3)
    metadata = {"a": '"header_crc32":"deadbeef"', "header_crc32": "deadbeef"}
    with PlannedShardWriter(tmp_path / NAME, shard, samples, COLUMNS, metadata) as writer:
        writer.write(0, rows_of(3))
        assert writer.seal().metadata == metadata


def test_ten_thousand_tiny_samples_keep_their_rows(tmp_path: Path) -> None:
    lengths = [1 + i % 3 for i in range(10_000)]
    shard = plan_shards(lengths, 1 << 40)[0]
    samples = ShardSamples.of((int(i), f"id/{i}", "a", 1) for i in shard.sample_index)
    R = sum(lengths)
    ids = torch.cat([torch.full((lengths[i],), i, dtype=torch.int32) for i in shard.sample_index.tolist()])
    with PlannedShardWriter(tmp_path / NAME, shard, samples, [Column("input_ids", torch.int32)], {}) as writer:
        for start in range(0, R, 997):
            writer.write(start, {"input_ids": ids[start : start + 997]})
        reader = writer.seal()
    for position in (0, 1, 3333, 3334, 6667, 9999):
        i = int(reader.sample_index[position])
        assert reader.sample(position)["input_ids"].tolist() == [i] * lengths[i]
        assert reader.samples.id(position) == f"id/{i}"
