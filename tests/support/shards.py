"""Small shards for the store's tests, and a reader of raw safetensors bytes that shares no code with the package."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hiddentap.capture.store import (
    Column,
    Manifest,
    OutputFolder,
    Plan,
    PlannedShard,
    PlannedShardWriter,
    PlanWriter,
    Shard,
    ShardSamples,
    plan_shards,
)

COLUMNS = (
    Column("aux_hidden_states", torch.bfloat16, (2, 4)),
    Column("pre_norm", torch.bfloat16, (4,)),
    Column("input_ids", torch.int32),
    Column("loss_mask", torch.uint8),
)


def names(folder: Path) -> list[str]:
    """The names of everything in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def open_files(folder: Path) -> int:
    """How many files below a folder this process holds open."""
    links = Path("/proc/self/fd").iterdir()
    return sum(link.resolve().is_relative_to(folder.resolve()) for link in links)


def planned(*lengths: int) -> tuple[PlannedShard, ShardSamples]:
    """One planned shard of samples with these lengths, called s0, s1, ... from lines 1, 2, ... of data.jsonl."""
    shard = plan_shards(list(lengths), 1 << 40)[0]
    return shard, ShardSamples.of((int(i), f"s{i}", "data.jsonl", int(i) + 1) for i in shard.sample_index)


def rows_of(R: int) -> dict[str, torch.Tensor]:
    """Distinct values for every column of COLUMNS; row r of input_ids is 100 + r."""
    numbers = torch.arange(R * 8, dtype=torch.float32)
    return {
        "aux_hidden_states": (numbers / 8 + 1).view(R, 2, 4).bfloat16(),
        "pre_norm": (-numbers[: R * 4] / 4 - 1).view(R, 4).bfloat16(),
        "input_ids": torch.arange(100, 100 + R, dtype=torch.int32),
        "loss_mask": (torch.arange(R) % 2).to(torch.uint8),
    }


def write_shard(path: Path, *lengths: int, rejected: tuple[int, ...] = ()) -> Shard:
    """A sealed shard of `rows_of`, written in one call; `rejected` are positions."""
    shard, samples = planned(*lengths)
    with PlannedShardWriter(path, shard, samples, COLUMNS, {"model": "m"}) as writer:
        writer.write(0, rows_of(shard.R))
        for position in rejected:
            writer.reject(position, "bad")
        return writer.seal()


def write_folder(folder: Path, count: int) -> Path:
    """A complete folder of `count` shards of one sample of two rows each."""
    out = OutputFolder(folder)
    out.shards.mkdir(parents=True)
    shards = []
    for index in range(count):
        samples = ShardSamples.of([(0, f"s{index}", "d.jsonl", index + 1)])
        path, shard = out.shard_path(index), plan_shards([2], 9)[0]
        with PlannedShardWriter(path, shard, samples, COLUMNS, {"n": index}) as writer:
            writer.write(0, rows_of(2))
            shards.append(writer.seal())
            shards[-1].close()
    Manifest.from_shards({}, {}, shards, complete=True).write(out.manifest_path)
    return folder


def raw_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON and the file offset of the data, read with struct and json alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def raw_tensor_bytes(path: Path, name: str) -> bytes:
    """A tensor's bytes, cut out by the header's offsets."""
    header, start = raw_header(path)
    begin, end = header[name]["data_offsets"]
    return path.read_bytes()[start + begin : start + end]


def write_plan(folder: Path, *lengths: int, shard_rows: int = 262_144) -> Plan:
    """A sealed plan: sample i is called s{i}, its ids count from 10 * i, its mask is 0, 1, 1, ..."""
    with PlanWriter(folder) as writer:
        for i, length in enumerate(lengths):
            ids = np.arange(10 * i, 10 * i + length)
            writer.add(ids, [0] + [1] * (length - 1), sample_id=f"s{i}", source=0, line=i + 1)
        return writer.seal({"model": "m"}, ["data.jsonl"], shard_rows=shard_rows)
