"""Streamed weights in half of the memory that the checkpoint takes, compared with a run in memory and with disk offload.

The model is a random Llama in float32 that is made for this section, whatever --model says: a model with all its memory must
fit here too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hiddentap import CapturedDataset

from .figures import Figure, in_order, ratios
from .memory_group import memory_group
from .rounds import Contender, run_rounds
from .samples import SEED
from .setting import Setting
from .streamed_ways import OFFLOADED, OFFLOADED_ROWS, PLAIN, START, STREAMED, Job, Took

SCRIPTS = Path(__file__).parents[1]
BATCHES = 32  # of a block
VOCABULARY = 2048
# What a process takes before any weight lies within this: half of the tiny checkpoint of --quick would not do.
LEAST_LIMIT = 700_000_000
# The share of the limit that offloading is told to fill with weights; the rest is for the process and its reading.
RESIDENT = 0.3
# Largest difference of rows, as a share of the largest value: other kernels may add in another order.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Size:
    """A model and its samples; every sample has `length` tokens and is a batch."""

    hidden: int
    layers: int
    length: int


FULL, QUICK = Size(1536, 16, 64), Size(64, 4, 16)


def streamed(setting: Setting) -> list[Figure]:
    """The three ways on the same rows; what each reads, and whether the rows are equal.

    Raises:
        NoMemoryGroupError: the memory of a process cannot be limited here.
        RuntimeError: rows differ.
    """
    size = QUICK if setting.quick else replace(FULL, length=setting.batch_tokens or FULL.length)
    with memory_group(LEAST_LIMIT):
        pass  # before a model is made
    with setting.scratch() as folder:
        checkpoint = _checkpoint(folder / "model", size)
        stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        ways = _Ways(folder, checkpoint, _rows(folder / "rows.jsonl", size), size, max(stored // 2, LEAST_LIMIT))
        contenders = [Contender(way, partial(ways.seconds, way)) for way in (PLAIN, STREAMED, OFFLOADED)]
        seconds = run_rounds("streamed", contenders, 1 if setting.quick else setting.rounds)
    return [*_sizes(ways, stored), *_speeds(ways, seconds), *_differences(ways)]


class _Ways:
    """The three ways on one checkpoint and one file of rows, and what each run took."""

    def __init__(self, folder: Path, checkpoint: Path, rows: Path, size: Size, limit: int) -> None:
        """`limit`: bytes of memory of the ways that do not hold the model."""
        self.size, self.limit = size, limit
        self.took: dict[str, list[Took]] = {way: [] for way in (PLAIN, STREAMED, OFFLOADED)}
        self.differences: dict[str, list[float]] = {STREAMED: [], OFFLOADED: []}
        self._folder, self._checkpoint, self._rows = folder, checkpoint, rows
        self._right: Tensor | None = None

    def seconds(self, way: str) -> float:
        """Run `way` in a new process, with nothing of the checkpoint in the page cache; compare its rows."""
        out = self._folder / "out"
        for file in self._checkpoint.glob("*.safetensors"):
            _drop_from_page_cache(file)
        job = Job(
            way,
            str(self._checkpoint),
            str(self._rows),
            str(out),
            (1, self.size.layers // 2, self.size.layers - 1),
            self.size.length,
            BATCHES * self.size.length,
            int(RESIDENT * self.limit),
            torch.get_num_threads(),
        )
        command = [sys.executable, "-c", START, str(SCRIPTS), json.dumps(asdict(job))]
        if way == PLAIN:
            took = _run(way, command)
        else:
            with memory_group(self.limit) as group:
                took = _run(way, group.command(*command))
        self.took[way].append(took)
        self._compare(way, _rows_of(way, out))
        shutil.rmtree(out)
        return took.seconds

    def _compare(self, way: str, rows: Tensor) -> None:
        if self._right is None:  # the first way of the first round
            self._right = rows
        if way == PLAIN:
            return
        difference = float((rows - self._right).abs().max() / self._right.abs().max())
        if difference > TOLERANCE:
            raise RuntimeError(f"rows of {way} differ from those of {PLAIN} by {difference:.1e} of the largest value")
        self.differences[way].append(difference)


def _run(way: str, command: Sequence[str]) -> Took:
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{way} ended with {ended.returncode}; -9 (137) means that its memory did not do")
    return Took(**json.loads(ended.stdout.splitlines()[-1]))


def _rows_of(way: str, out: Path) -> Tensor:
    """Return (M, S, K, H) in input order."""
    if way == OFFLOADED:
        return load_file(out / OFFLOADED_ROWS)["rows"]
    dataset = CapturedDataset(out)
    return torch.stack([dataset[i]["aux_hidden_states"] for i in range(len(dataset))])


def _checkpoint(folder: Path, size: Size) -> Path:
    """Save a random Llama, its files on the disk."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=8 * size.hidden // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=max(size.hidden // 96, 4),
        num_key_value_heads=4,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="500MB")
    os.sync()  # only what is on the disk can leave the page cache
    return folder


def _rows(path: Path, size: Size) -> Path:
    ids = np.random.default_rng(SEED).integers(3, VOCABULARY, (BATCHES, size.length)).tolist()
    path.write_text("".join(json.dumps({"id": str(i), "input_ids": row}) + "\n" for i, row in enumerate(ids)))
    return path


def _drop_from_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _sizes(ways: _Ways, stored: int) -> list[Figure]:
    positions = f"positions of each of the {BATCHES} batches of a block"
    return [
        Figure("streamed", "checkpoint", "equal", "MB", (stored / 1e6,)),
        Figure("streamed", "memory of the process, page cache included", "equal", "MB", (ways.limit / 1e6,)),
        Figure("streamed", positions, "equal", "positions", (ways.size.length,)),
    ]


def _speeds(ways: _Ways, seconds: Mapping[str, Mapping[int, float]]) -> list[Figure]:
    tokens, figures = BATCHES * ways.size.length, []
    for way, of in seconds.items():
        before = tuple(took.whole - took.seconds for took in ways.took[way])
        read = tuple(took.read / 1e6 for took in ways.took[way])
        figures += [
            Figure("streamed", way, "equal", "tokens/s", tuple(tokens / s for s in in_order(of))),
            Figure("streamed", f"imports, loading and planning, {way}", "equal", "s", before),
            Figure("streamed", f"read from the disk, {way}", "equal", "MB", read),
        ]
    figures += ratios("streamed", f"speed, {STREAMED} / {OFFLOADED}", "equal", seconds[OFFLOADED], seconds[STREAMED])
    return figures + ratios("streamed", f"time, {STREAMED} / {PLAIN}", "equal", seconds[STREAMED], seconds[PLAIN])


def _differences(ways: _Ways) -> list[Figure]:
    what = "largest difference to a row in memory / largest value"
    return [Figure("streamed", f"{what}, {way}", "equal", "x", tuple(of)) for way, of in ways.differences.items()]
