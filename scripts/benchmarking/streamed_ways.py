"""Three ways to take rows of a model, each in a process of its own: in memory, with streamed weights, offloaded to the disk.

Runs as `python -c "..." SCRIPTS JOB` and prints what it took as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

START = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarking.streamed_ways import report; report()"
PLAIN, STREAMED, OFFLOADED = "in memory", "streamed weights", "device_map with disk offload"
OFFLOADED_ROWS = "rows.safetensors"


@dataclass(frozen=True)
class Job:
    """One run: a way, a model, a file of rows that are all `length` tokens long, and the folder that it fills.

    layers: 0-based; their outputs are taken. block: positions of a block. resident: bytes of weights that offloading keeps.
    """

    way: str
    model: str
    rows: str
    out: str
    layers: Sequence[int]
    length: int
    block: int
    resident: int
    threads: int


@dataclass(frozen=True)
class Took:
    """seconds: from the first forward to the last row; whole: loading and planning included; read: bytes from the disk."""

    seconds: float
    whole: float
    read: int


def report() -> None:
    """In the process of a run: do the job, and print what it took."""
    job = Job(**json.loads(sys.argv[2]))
    torch.set_num_threads(job.threads)
    began, read = time.perf_counter(), _bytes_read()
    seconds = _offloaded(job) if job.way == OFFLOADED else _captured(job)
    took = Took(seconds, time.perf_counter() - began, _bytes_read() - read)
    print(json.dumps(asdict(took)))


def _captured(job: Job) -> float:
    from hiddentap import CaptureSettings, ModelSource, capture_dataset

    fields: dict[str, Any] = {"stream_weights": True, "block_tokens": job.block} if job.way == STREAMED else {}
    asked = CaptureSettings(
        ModelSource(job.model, device="cpu"),
        (job.rows,),
        job.out,
        layer_ids=tuple(job.layers),
        final="none",
        batch_tokens=job.length,
        shard_rows=job.block,
        compile="off",
        **fields,
    )
    return capture_dataset(asked).seconds


@torch.inference_mode()
def _offloaded(job: Job) -> float:
    """As a user of transformers writes it: layers that have no room stay on the disk, and hooks of accelerate read them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, device_map="auto", max_memory={"cpu": job.resident}, offload_folder=f"{job.out}-offload"
    )
    decoder = model.get_decoder()
    taken: dict[int, Tensor] = {}
    for layer in job.layers:
        decoder.layers[layer].register_forward_hook(
            lambda _module, _args, output, layer=layer: taken.update({layer: output})
        )
    samples = [json.loads(line)["input_ids"] for line in Path(job.rows).read_text().splitlines()]
    rows, began = [], time.perf_counter()
    for ids in samples:
        decoder(input_ids=torch.tensor([ids]), use_cache=False)
        rows.append(torch.stack([taken[layer][0] for layer in job.layers], 1))
    seconds = time.perf_counter() - began
    Path(job.out).mkdir()
    save_file({"rows": torch.stack(rows)}, Path(job.out) / OFFLOADED_ROWS)
    return seconds


def _bytes_read() -> int:
    """Return the bytes that this process has had the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
