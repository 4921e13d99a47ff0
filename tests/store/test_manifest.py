"""manifest.json, and what differs between two runs."""

import json
from pathlib import Path

import pytest

from hiddentap.capture.store import Manifest, ShardEntry, differences
from hiddentap.models.errors import RunError, UsageError
from support.shards import write_shard


def test_counts_come_from_the_shards_and_the_file_comes_back(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    second = write_shard(tmp_path / "shards" / "shard-000001.safetensors", 2, 3, 4, rejected=(1,))
    first = write_shard(tmp_path / "shards" / "shard-000000.safetensors", 5)
    manifest = Manifest.from_shards(
        {"model": "m"}, {"samples": 4}, [second, first], complete=True, counts={"truncated": 1}
    )
    manifest.write(tmp_path / "manifest.json")
    record = json.loads((tmp_path / "manifest.json").read_text())
    assert record["counts"] == {
        "captured": 3,
        "rejected": 1,
        "rows": 11,
        "truncated": 1,
    }
    assert record["shards"] == [
        {"file": "shards/shard-000000.safetensors", "rows": 5, "samples": 1, "bytes": first.path.stat().st_size},
        {"file": "shards/shard-000001.safetensors", "rows": 6, "samples": 2, "bytes": second.path.stat().st_size},
    ]
    assert (record["complete"], record["identity"], record["format_version"]) == (True, {"model": "m"}, 1)
    read = Manifest.read(tmp_path / "manifest.json")
    assert read == manifest
    assert read.shards[0] == ShardEntry("shards/shard-000000.safetensors", 5, 1, first.path.stat().st_size)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "hiddentap", "format_version": 9, "shards": []}']
)
def test_a_file_that_is_no_manifest_is_refused_by_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest.json is no manifest of this format"):
        Manifest.read(tmp_path / "manifest.json")


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    Manifest.from_shards({"a": 1}, {}, [], complete=False).write(path)
    with pytest.raises(UsageError, match="the manifest must be JSON"):
        Manifest.from_shards({"a": float("nan")}, {}, [], complete=True).write(path)
    assert Manifest.read(path).identity == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_differences_name_nested_keys_with_both_values() -> None:
    old = {"model": {"id": "a", "revision": "1"}, "layers": [1, 2], "gone": True, "same": {}}
    new = {"model": {"id": "b", "revision": "1"}, "layers": (1, 3), "new": None, "same": {}}
    assert differences(old, new) == [
        "gone: true -> absent",
        "layers: [1, 2] -> [1, 3]",
        'model.id: "a" -> "b"',
        "new: absent -> null",
    ]
    assert differences({"layers": [1, 2]}, {"layers": (1, 2)}) == []
    assert differences({"a": 1}, {"a": True}) == ["a: 1 -> true"]
