"""The plan on disk."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hiddentap.capture.store import Plan, PlanDamagedError, PlanError, PlanExtra, PlanWriter, Reject
from hiddentap.models.checked_record import with_checksum
from hiddentap.models.errors import UsageError
from support.shards import names, write_plan, write_shard


def test_what_was_added_comes_back(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "plan") as writer:
        writer.add([5, 6, 7], [0, 1, 1], sample_id="a/../é", source=0, line=1)
        writer.add(torch.tensor([8]), torch.tensor([True]), sample_id="", source=1, line=12, truncated_from=40)
        writer.add(
            np.array([2**31 - 1, 0], np.int32), np.array([0, 1], np.uint8), sample_id="b" * 300, source=0, line=2
        )
        writer.reject(Reject("x.jsonl", 3, None, "bad JSON", {"column": 9}))
        assert (writer.samples, writer.rows) == (3, 6)
        plan = writer.seal(
            {"model": "m"}, ["x.jsonl", "y.jsonl"], shard_rows=4, extra=PlanExtra(truncated=1, notes=("n",))
        )
    for opened in (plan, Plan(tmp_path / "plan"), pickle.loads(pickle.dumps(plan))):
        assert [opened.input_ids(i).tolist() for i in range(3)] == [[5, 6, 7], [8], [2**31 - 1, 0]]
        assert [opened.loss_mask(i).tolist() for i in range(3)] == [[0, 1, 1], [1], [0, 1]]
        assert [opened.sample_id(i) for i in range(3)] == ["a/../é", "", "b" * 300]
        assert opened.lengths.tolist() == [3, 1, 2]
        assert opened.truncated_from.tolist() == [0, 40, 0]
        assert opened.line.tolist() == [1, 12, 2]
        assert [opened.sources[s] for s in opened.source_index] == ["x.jsonl", "y.jsonl", "x.jsonl"]
        assert list(opened.rejects()) == [Reject("x.jsonl", 3, None, "bad JSON", {"column": 9})]
        assert (opened.identity, opened.extra) == ({"model": "m"}, PlanExtra(truncated=1, notes=("n",)))
        counts = {"samples": 3, "rows": 6, "shards": 2, "shard_rows": 4, "rejected": 1}
        crc32 = json.loads((tmp_path / "plan" / "plan.json").read_text())["crc32"]
        assert opened.summary() == counts | {"crc32": crc32}
        assert opened.check() == []


def test_tokens_and_ids_of_a_shard_follow_its_row_order(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", 3, 1, 2, 4, shard_rows=6)
    first, second = plan.shards
    assert first.sample_index.tolist() == [1, 2, 0]
    ids, mask = plan.tokens_of(first)
    assert (ids.dtype, mask.dtype) == (torch.int32, torch.uint8)
    assert ids.tolist() == [10, 20, 21, 0, 1, 2]
    assert mask.tolist() == [0, 0, 1, 0, 1, 1]
    samples = plan.samples_of(first)
    assert [samples.id(j) for j in range(3)] == ["s1", "s2", "s0"]
    assert samples.line.tolist() == [2, 3, 1]
    assert plan.tokens_of(second)[0].tolist() == [30, 31, 32, 33]
    assert plan.samples_of(second).id(0) == "s3"


def test_the_public_library_reads_every_file_of_a_plan(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", 3, 1)
    with safe_open(tmp_path / "plan" / "input_ids.safetensors", "pt") as file:
        assert file.get_tensor("input_ids").tolist() == [0, 1, 2, 10]
    with safe_open(tmp_path / "plan" / "sample_id_offsets.safetensors", "pt") as file:
        assert file.get_tensor("sample_id_offsets").tolist() == [0, 2, 4]


def test_a_plan_without_samples_is_a_plan(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan")
    assert (plan.M, plan.R, len(plan.shards), plan.lengths.tolist(), list(plan.rejects())) == (0, 0, 0, [], [])


def test_a_plan_larger_than_its_buffers_keeps_its_checksums(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "plan") as writer:
        for i in range(3):
            writer.add(np.full(300_000, i), np.ones(300_000, np.uint8), sample_id=str(i), source=0, line=1)
        plan = writer.seal({}, ["a"])
    assert plan.check() == []
    assert [int(plan.input_ids(i).sum()) for i in range(3)] == [0, 300_000, 600_000]


def test_leaving_without_a_seal_leaves_an_empty_folder(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "plan") as writer:
        writer.add([1], [1], sample_id="a", source=0, line=1)
    assert names(tmp_path / "plan") == []
    with pytest.raises(PlanError, match="is no sealed plan"):
        Plan(tmp_path / "plan")


def test_a_new_writer_replaces_what_a_killed_one_left_but_no_sealed_plan(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "input_ids.safetensors").write_bytes(b"old")
    (tmp_path / "plan" / "lengths.safetensors.open").write_bytes(b"old")
    plan = write_plan(tmp_path / "plan", 2)
    assert plan.input_ids(0).tolist() == [0, 1]
    with pytest.raises(UsageError, match="holds a sealed plan"):
        PlanWriter(tmp_path / "plan")
    assert Plan(tmp_path / "plan").M == 1


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([], [], "one length >= 1, got 0 and 0"),
        ([1, 2], [1], "one length >= 1, got 2 and 1"),
        ([-1], [1], r"input_ids must lie in 0\.\.2147483647, found -1"),
        ([2**31], [1], "input_ids must lie in"),
        ([1], [2], r"loss_mask must lie in 0\.\.1, found 2"),
        ([1.5], [1], "input_ids must be one row of integers, got float64"),
        ([[1]], [1], "input_ids must be one row of integers"),
    ],
)
def test_samples_that_make_no_sense_are_refused_by_id(
    tmp_path: Path, ids: list[int], mask: list[int], message: str
) -> None:
    with PlanWriter(tmp_path / "plan") as writer, pytest.raises(UsageError, match=f"'odd'.*{message}"):
        writer.add(ids, mask, sample_id="odd", source=0, line=1)


def test_an_id_with_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "plan") as writer, pytest.raises(UsageError, match="lone surrogate"):
        writer.add([1], [1], sample_id="\ud800", source=0, line=1)


def test_damage_of_the_plan_is_named(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", 3, 1)
    path = tmp_path / "plan" / "loss_mask.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [line.split(":")[0] for line in Plan(plan.folder).check()] == [str(path)]
    path.write_bytes(whole[:-1])
    with pytest.raises(PlanError, match=r"the plan is damaged: .*loss_mask.safetensors: truncated"):
        Plan(plan.folder)
    path.unlink()
    with pytest.raises(PlanError, match=r"loss_mask.safetensors: cannot be opened"):
        Plan(plan.folder)
    (plan.folder / "plan.json").write_text("{")
    with pytest.raises(PlanError, match=r"plan.json cannot be read"):
        Plan(plan.folder)


def test_a_plan_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", 3)
    record = json.loads((plan.folder / "plan.json").read_text())
    (plan.folder / "plan.json").write_text(json.dumps({**record, "format_version": 2}))
    with pytest.raises(PlanError, match="format version 2, this release reads 1"):
        Plan(plan.folder)


def test_a_planned_shard_knows_the_file_that_holds_it(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", 3, 5)
    planned = plan.shards[0]
    assert planned.is_held_by(write_shard(tmp_path / "a.safetensors", 3, 5))
    assert planned.is_held_by(write_shard(tmp_path / "b.safetensors", 3, 5, rejected=(1,)))
    assert not planned.is_held_by(write_shard(tmp_path / "c.safetensors", 3, 4))
    assert not planned.is_held_by(write_shard(tmp_path / "d.safetensors", 3))
    assert not planned.is_held_by(write_shard(tmp_path / "e.safetensors", 3, 5, 6, rejected=(2,)))


@pytest.mark.parametrize("extra", [{"seen": 4}, {"truncated": "many"}, {"warnings": [1]}])
def test_extra_values_that_no_plan_has_are_damage(tmp_path: Path, extra: dict[str, object]) -> None:
    write_plan(tmp_path / "plan", 3)
    path = tmp_path / "plan" / "plan.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(with_checksum(record | {"extra": extra})))
    with pytest.raises(PlanDamagedError, match=next(iter(extra))):
        Plan(tmp_path / "plan")
