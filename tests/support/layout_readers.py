"""Small readers of other trainers' layouts, written from the layouts' descriptions and from nothing of the package.

Each gives the samples in the order in which the trainer meets them.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def containers(folder: Path, *suffixes: str) -> list[dict[str, Any]]:
    """Every file below `folder` with one of the suffixes, by path."""
    paths = sorted(str(path) for path in folder.rglob("*") if path.name.endswith(suffixes))
    return [container(Path(path)) for path in paths]


def container(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return torch.load(io.BytesIO(data), weights_only=True)


def deepspec_cache(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest, and per sample its record and arrays."""
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {shard["shard_id"]: shard["file_name"] for shard in manifest["shards"]}
    H, L = manifest["hidden_size"], len(manifest["target_layer_ids"])
    samples = []
    for fields in struct.iter_unpack("<QIIQQQQQ", (folder / "samples.idx").read_bytes()):
        sample_id, shard_id, S, *offsets = fields
        data = (folder / names[shard_id]).read_bytes()
        ids, attention, mask, aux, last = offsets
        samples.append(
            {
                "sample_id": sample_id,
                "shard_id": shard_id,
                "input_ids": list(struct.unpack_from(f"<{S}i", data, ids)),
                "attention_mask": list(data[attention : attention + S]),
                "loss_mask": list(data[mask : mask + S]),
                "target_hidden_states": _bfloat16(data, aux, S, L * H),
                "target_last_hidden_states": _bfloat16(data, last, S, H),
                "end": last + 2 * S * H,
            }
        )
    return manifest, samples


def padded_shards(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[int]]:
    """The manifest, the tensors of all shards joined along the samples, and how many samples each shard has."""
    manifest = json.loads((folder / "manifest.json").read_text())
    count = -(-manifest["num_samples"] // manifest["shard_size"])
    shards = [load_file(folder / f"shard-{k:06d}.safetensors") for k in range(count)]
    joined = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
    return manifest, joined, [len(shard["input_ids"]) for shard in shards]


def arrow_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a saved data set, by pyarrow alone."""
    import pyarrow

    state = json.loads((folder / "state.json").read_text())
    rows: list[dict[str, Any]] = []
    for file in state["_data_files"]:
        with pyarrow.memory_map(str(folder / file["filename"])) as source:
            rows += pyarrow.ipc.open_stream(source).read_all().to_pylist()
    return rows


def _bfloat16(data: bytes, offset: int, S: int, width: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[offset : offset + 2 * S * width]), dtype=torch.bfloat16).view(S, width)
