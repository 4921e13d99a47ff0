"""Shards whose rows come as they are made: generation and import."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hiddentap.capture.store import Column, GrowingShardWriter, Shard, capture_columns, generation_columns
from hiddentap.models.errors import RunError, UsageError
from support.shards import COLUMNS, names, raw_tensor_bytes, rows_of, write_shard

NAME = "shard-000000.safetensors"
IDS = (Column("input_ids", torch.int32),)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_interleaved_samples_are_put_in_the_order_they_began(tmp_path: Path) -> None:
    with GrowingShardWriter(tmp_path / NAME, IDS, {"mode": "generate"}) as writer:
        first = writer.begin(7, "x", "prompts.jsonl", 3)
        second = writer.begin(4, "y", "more.jsonl", 1)
        writer.append(first, {"input_ids": int32(1, 2)})
        writer.append(second, {"input_ids": int32(10)})
        writer.append(first, {"input_ids": int32(3)})
        writer.append(second, {"input_ids": int32(11, 12)})
        writer.append(second, {"input_ids": int32()})
        assert (writer.rows, writer.samples) == (6, 2)
        shard = writer.seal()
    with safe_open(tmp_path / NAME, "pt") as file:
        assert file.get_tensor("input_ids").tolist() == [1, 2, 3, 10, 11, 12]
        assert file.get_tensor("row_offsets").tolist() == [0, 3, 6]
        assert file.get_tensor("sample_index").tolist() == [7, 4]
    assert [(shard.samples.id(j), shard.samples.source(j), int(shard.samples.line[j])) for j in (0, 1)] == [
        ("x", "prompts.jsonl", 3),
        ("y", "more.jsonl", 1),
    ]
    assert names(tmp_path) == [NAME]


def test_a_grown_shard_holds_the_same_tensors_as_a_planned_one(tmp_path: Path) -> None:
    write_shard(tmp_path / "planned.safetensors", 3, 5)
    rows = rows_of(8)
    with GrowingShardWriter(tmp_path / "grown.safetensors", COLUMNS, {"model": "m"}) as writer:
        for index, start, stop in ((0, 0, 3), (1, 3, 8)):
            sample = writer.begin(index, f"s{index}", "data.jsonl", index + 1)
            for row in range(start, stop):
                writer.append(sample, {name: tensor[row : row + 1] for name, tensor in rows.items()})
        writer.seal()
    assert (tmp_path / "planned.safetensors").read_bytes() == (tmp_path / "grown.safetensors").read_bytes()


def test_prompt_and_generated_rows_with_sampling_masks_of_every_kind(tmp_path: Path) -> None:
    columns = (*capture_columns(1, 2, torch.bfloat16), *generation_columns(sampling_masks=True, topk=2))
    with GrowingShardWriter(tmp_path / NAME, columns, {}) as writer:
        for index in (0, 1):
            sample = writer.begin(index, f"s{index}")
            writer.append(
                sample,
                {
                    "aux_hidden_states": torch.full((4, 1, 2), float(index)).bfloat16(),
                    "input_ids": int32(5, 6, 7, 8 + index),
                    "loss_mask": torch.tensor([0, 0, 0, 1], dtype=torch.uint8),
                    "output_ids": int32(-1, -1, 8 + index, 9),
                    "topk_logits": torch.arange(8, dtype=torch.float32).view(4, 2),
                    "topk_ids": int32(*range(8)).view(4, 2),
                    "topk_logsumexp": torch.zeros(4),
                    "sampling_mask_lengths": int32(-1, -1, 0, 2 + index),
                    "sampling_mask_ids": int32(*range(40, 42 + index)),
                },
            )
        shard = writer.seal()
    with safe_open(tmp_path / NAME, "pt") as file:
        assert file.get_tensor("sampling_mask_ids").tolist() == [40, 41, 40, 41, 42]
        assert file.get_tensor("sampling_mask_lengths").tolist() == [-1, -1, 0, 2, -1, -1, 0, 3]
        assert file.get_tensor("output_ids").tolist() == [-1, -1, 8, 9, -1, -1, 9, 9]
    assert shard.sample(1)["sampling_mask_ids"].tolist() == [40, 41, 42]
    assert shard.sample(0)["sampling_mask_ids"].tolist() == [40, 41]
    assert shard.sample(1)["topk_logits"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_rejected_sample_leaves_its_record_and_no_row(tmp_path: Path) -> None:
    with GrowingShardWriter(tmp_path / NAME, IDS, {}) as writer:
        bad, good = writer.begin(0, "bad", "p", 1), writer.begin(1, "good", "p", 2)
        writer.append(bad, {"input_ids": int32(1, 2, 3)})
        writer.append(good, {"input_ids": int32(9)})
        writer.reject(bad, "overflow", {"token": 2})
        assert (writer.rows, writer.samples) == (1, 1)
        shard = writer.seal()
    assert raw_tensor_bytes(tmp_path / NAME, "input_ids") == b"\x09\0\0\0"
    assert [(reject.sample_id, reject.reason, reject.line, reject.sample_index) for reject in shard.rejects] == [
        ("bad", "overflow", 1, 0)
    ]


def test_large_samples_pass_through_a_bounded_buffer_unchanged(tmp_path: Path) -> None:
    rows = torch.arange(3 * 1_500_000, dtype=torch.int32)
    with GrowingShardWriter(tmp_path / NAME, IDS, {}) as writer:
        handles = [writer.begin(i, str(i)) for i in range(2)]
        writer.append(handles[1], {"input_ids": rows[:1_500_000]})
        writer.append(handles[0], {"input_ids": rows[1_500_000:3_000_000]})
        writer.append(handles[1], {"input_ids": rows[3_000_000:]})
        shard = writer.seal()
    assert torch.equal(shard.sample(0)["input_ids"], rows[1_500_000:3_000_000])
    assert torch.equal(shard.sample(1)["input_ids"], torch.cat((rows[:1_500_000], rows[3_000_000:])))


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        (
            {"input_ids": int32(1, 2), "loss_mask": torch.ones(1, dtype=torch.uint8)},
            r"sample 'x': every column needs the same number of rows.*'input_ids': 2, 'loss_mask': 1",
        ),
        ({}, "sample 'x': every column needs the same number of rows, at least one"),
    ],
)
def test_columns_that_differ_in_rows_are_not_sealed(
    tmp_path: Path, appended: dict[str, torch.Tensor], message: str
) -> None:
    with GrowingShardWriter(tmp_path / NAME, (*IDS, Column("loss_mask", torch.uint8)), {}) as writer:
        writer.append(writer.begin(0, "x"), appended)
        with pytest.raises(RunError, match=message):
            writer.seal()
    assert names(tmp_path) == []


def test_mask_ids_must_be_as_many_as_their_lengths_say(tmp_path: Path) -> None:
    columns = (*IDS, *generation_columns(sampling_masks=True))
    with GrowingShardWriter(tmp_path / NAME, columns, {}) as writer:
        sample = writer.begin(0, "x")
        writer.append(sample, {"input_ids": int32(1), "output_ids": int32(2), "sampling_mask_lengths": int32(3)})
        writer.append(sample, {"sampling_mask_ids": int32(2, 5)})
        with pytest.raises(RunError, match="sampling_mask_lengths add up to 3, sampling_mask_ids has 2"):
            writer.seal()


def test_wrong_rows_are_refused_and_nothing_of_the_call_is_kept(tmp_path: Path) -> None:
    with GrowingShardWriter(tmp_path / NAME, (*IDS, Column("loss_mask", torch.uint8)), {}) as writer:
        sample = writer.begin(0, "x")
        with pytest.raises(UsageError, match=r"loss_mask, next rows of sample 'x': expected dtype torch.uint8"):
            writer.append(sample, {"input_ids": int32(1), "loss_mask": int32(1)})
        with pytest.raises(UsageError, match="not 'logits'"):
            writer.append(sample, {"input_ids": int32(1), "logits": int32(1)})
        with pytest.raises(UsageError, match=r"has begun samples 0\.\.0, got 1"):
            writer.append(1, {"input_ids": int32(1)})
        assert writer.rows == 0


def test_a_sealed_empty_shard_reads_as_empty(tmp_path: Path) -> None:
    with GrowingShardWriter(tmp_path / NAME, IDS, {}) as writer:
        writer.seal()
    shard = Shard(tmp_path / NAME)
    assert (shard.M, shard.R) == (0, 0)


def test_leaving_without_a_seal_removes_shard_and_spools(tmp_path: Path) -> None:
    with GrowingShardWriter(tmp_path / NAME, IDS, {}) as writer:
        writer.append(writer.begin(0, "x"), {"input_ids": int32(1)})
        assert names(tmp_path) == [f"{NAME}.input_ids.spool", f"{NAME}.open"]
    assert names(tmp_path) == []
