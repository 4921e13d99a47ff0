"""Captured folders damaged on purpose: shards written again by the store's own writers, so that every checksum is right."""

import json
import struct
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


def flip_bit(path: Path, tensor: str, byte: int = 0) -> None:
    """Flip the lowest bit of one byte of a tensor in the file, after the seal."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]
    data[start + byte] ^= 1
    path.write_bytes(data)
