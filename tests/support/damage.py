"""Captured folders damaged on purpose: shards written again by the store's own writers, so that every checksum is right."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddentap.capture.store import Manifest, OutputFolder, Plan, PlannedShardWriter, Shard

Columns = dict[str, Tensor]


def rewrite(
    out: Path,
    change: Callable[[Columns], None] = lambda columns: None,
    *,
    index: int | None = None,
    sample: str | None = None,
    metadata: Callable[[dict[str, Any]], None] = lambda metadata: None,
) -> None:
    """Change the columns of samples, each (S, ...), in place or by assignment; of every shard or one, every sample or one."""
    folder, plan = OutputFolder(out), Plan(out / "plan")
    for place, shard in folder.sealed_shards().shards.items():
        if index is None or place == index:
            _write_again(folder, plan, place, shard, change, sample, metadata)
    old = Manifest.read(folder.manifest_path)
    shards = folder.sealed_shards().shards.values()
    Manifest.from_shards(old.identity, old.plan, shards, complete=True, counts=old.counts).write(folder.manifest_path)


def _write_again(folder, plan, place, shard: Shard, change, sample, metadata) -> None:
    samples = [shard.sample(position) for position in range(shard.M)]
    for position, columns in enumerate(samples):
        if sample is None or shard.samples.id(position) == sample:
            change(columns)
    about = shard.metadata
    metadata(about)
    planned = plan.shards[place]
    with PlannedShardWriter(shard.path, planned, plan.samples_of(planned), shard.columns, about) as writer:
        writer.write(0, {name: torch.cat([columns[name] for columns in samples]) for name in samples[0]})
        writer.seal()


def change_record(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON record in place and give it the checksum that is right then, as whoever wrote it so would have."""
    record = json.loads(path.read_text())
    change(record)
    record.pop("crc32", None)
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(record | {"crc32": f"{zlib.crc32(text.encode()):08x}"}))


def change_identity(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the identity in a folder's plan and manifest, whose checksum of the plan follows."""
    change_record(out / "plan/plan.json", lambda record: change(record["identity"]))
    checksum = json.loads((out / "plan/plan.json").read_text())["crc32"]

    def follow(record: dict[str, Any]) -> None:
        change(record["identity"])
        record["plan"]["crc32"] = checksum

    change_record(out / "manifest.json", follow)


def as_earlier_release(out: Path) -> None:
    """Take out of a folder what the first release did not write: checksums of records, of the head, of the weights."""
    for name in ("plan/plan.json", "manifest.json"):
        path = out / name
        if path.exists():
            record = json.loads(path.read_text())
            for key in ("crc32", "rejects_crc32"):
                record.pop(key, None)
            for key in ("crc32",):
                (record.get("plan") or {}).pop(key, None)
            (record.get("extra") or {}).pop("weights_crc32", None)
            path.write_text(json.dumps(record, sort_keys=True, indent=1) + "\n")
    head = out / "head/head.json"
    if head.exists():
        record = json.loads(head.read_text())
        head.write_text(json.dumps({key: record[key] for key in ("paths", "tied")}, sort_keys=True, indent=1))


def change_raw_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON of a safetensors header in place, whatever its own checksum says."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    change(head)
    raw = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a shard's seal record in place and give the header the checksum that is right then."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    record = json.loads(head["__metadata__"]["hiddentap"])
    change(record)
    guarded = "header_crc32" in record
    record |= {"header_crc32": "00000000"} if guarded else {}
    head["__metadata__"]["hiddentap"] = json.dumps(record, sort_keys=True, separators=(",", ":"))
    raw = json.dumps(head, separators=(",", ":")).encode()
    mark = rb'\\"header_crc32\\":\\"'.replace(rb"\\", b"\\")
    if guarded:
        raw = raw.replace(mark + b"00000000", mark + f"{zlib.crc32(raw):08x}".encode(), 1)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def flip_bit(path: Path, tensor: str, byte: int = 0) -> None:
    """Flip the lowest bit of one byte of a tensor in the file, after the seal."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]
    data[start + byte] ^= 1
    path.write_bytes(data)
