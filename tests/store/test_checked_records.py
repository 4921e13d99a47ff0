"""plan.json and manifest.json carry a checksum of themselves: any bit that changes is noticed, and older files still open."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddentap.capture.store import Manifest, Plan, PlanError
from hiddentap.models.errors import RunError
from support.shards import write_plan, write_shard


def plan_file(folder: Path) -> Path:
    write_plan(folder / "plan", 3, 1, 4, shard_rows=4)
    return folder / "plan" / "plan.json"


def manifest_file(folder: Path) -> Path:
    (folder / "shards").mkdir()
    shard = write_shard(folder / "shards" / "shard-000000.safetensors", 5, 2)
    Manifest.from_shards({"model": "m"}, {}, [shard], complete=True).write(folder / "manifest.json")
    return folder / "manifest.json"


def opened(path: Path) -> object:
    return Plan(path.parent) if path.name == "plan.json" else Manifest.read(path)


@pytest.mark.parametrize("make", [plan_file, manifest_file])
def test_every_bit_that_changes_a_record_is_noticed(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    unseen = []
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                opened(path)
            except (PlanError, RunError):
                continue
            unseen.append(changed)
    assert all(json.loads(changed) == json.loads(whole) for changed in unseen)


@pytest.mark.parametrize("make", [plan_file, manifest_file])
def test_a_record_of_an_earlier_release_has_no_checksum_and_opens(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    record = json.loads(path.read_text())
    del record["crc32"]
    record.pop("rejects_crc32", None)
    path.write_text(json.dumps(record))
    assert opened(path)


def test_a_manifest_whose_list_and_counts_disagree_says_so(tmp_path: Path) -> None:
    path = manifest_file(tmp_path)
    assert Manifest.read(path).contradictions() == []
    record = json.loads(path.read_text())
    del record["crc32"]
    record["shards"] = []
    path.write_text(json.dumps(record))
    assert Manifest.read(path).contradictions() == ["it says 2 captured and lists 0", "it says 7 rows and lists 0"]
