"""The writer beside plain writes of the same bytes, and the reader beside a plain memory map of them."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hiddentap import CapturedDataset
from hiddentap.capture.store import Plan, PlannedShardWriter

from .figures import Figure, in_order, ratios
from .rounds import Contender, run_rounds
from .samples import Samples, near
from .setting import Setting
from .this_project import Hiddentap, write_plan

ROWS, QUICK_ROWS = 65_536, 2_048
# As a run hands them over: a batch at a time.
CHUNK_ROWS = 2_048
READS, QUICK_READS = 1_000, 20

Columns = dict[str, Tensor]


def storage(setting: Setting) -> list[Figure]:
    """One shard of near lengths with the rows of the model; files are read from the page cache."""
    ours = Hiddentap(setting.loaded, setting.asked())
    samples = near(QUICK_ROWS if setting.quick else ROWS, setting.vocabulary)
    with setting.scratch() as folder:
        plan = write_plan(folder / "plan", samples, 1)
        columns = _columns(ours, plan)
        size = sum(tensor.nbytes for tensor in columns.values())
        shard, raw = folder / "written.safetensors", folder / "written.raw"
        contenders = [
            Contender("writer, sealed", partial(_write_shard, ours, plan, columns, shard)),
            Contender("plain write() + fsync", partial(_write_raw, columns, raw)),
        ]
        written = run_rounds("writer", contenders, setting.rounds)
        reads = _readers(setting, shard, samples, columns)
    megabytes = {who: tuple(size / s / 1e6 for s in in_order(of)) for who, of in written.items()}
    figures = [Figure("storage", who, "near", "MB/s", values) for who, values in megabytes.items()]
    plain, sealed = written["plain write() + fsync"], written["writer, sealed"]
    return [*figures, *ratios("storage", "speed, writer / plain write() + fsync", "near", plain, sealed), *reads]


def _columns(ours: Hiddentap, plan: Plan) -> Columns:
    """Rows for every column of the plan's one shard."""
    (planned,) = plan.shards
    input_ids, loss_mask = plan.tokens_of(planned)
    rows: Columns = {"input_ids": input_ids, "loss_mask": loss_mask}
    for column in ours.columns:
        if column.name not in rows:
            rows[column.name] = torch.randn(planned.R, *column.shape).to(column.dtype)
    return rows


def _chunks(columns: Columns) -> list[tuple[int, Columns]]:
    R = len(columns["input_ids"])
    return [
        (start, {name: tensor[start : start + CHUNK_ROWS] for name, tensor in columns.items()})
        for start in range(0, R, CHUNK_ROWS)
    ]


def _write_shard(ours: Hiddentap, plan: Plan, columns: Columns, path: Path) -> float:
    path.unlink(missing_ok=True)
    (planned,), chunks = plan.shards, _chunks(columns)
    start = time.perf_counter()
    with PlannedShardWriter(path, planned, plan.samples_of(planned), ours.columns, {}) as writer:
        for row_start, rows in chunks:
            writer.write(row_start, rows)
        writer.seal().close()
    return time.perf_counter() - start


def _write_raw(columns: Columns, path: Path) -> float:
    path.unlink(missing_ok=True)
    parts = [_bytes(tensor) for _, rows in _chunks(columns) for tensor in rows.values()]
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for part in parts:
        while part:
            part = part[os.write(fd, part) :]
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data


def _readers(setting: Setting, shard: Path, samples: Samples, columns: Columns) -> list[Figure]:
    """Random samples, each column of one copied into memory of its own; a worker of torch's DataLoader has one thread."""
    dataset = CapturedDataset(shard)
    rng = np.random.default_rng(0)
    order = rng.integers(0, len(dataset), QUICK_READS if setting.quick else READS).tolist()
    mapped, ranges = _mapped(shard, columns), _ranges(samples)
    figures = []
    for threads in sorted({1, torch.get_num_threads()}):
        ours, plain = (
            f"{who}, {threads} thread{'s'[: threads > 1]}" for who in ("CapturedDataset", "plain memory map + clone")
        )
        contenders = [
            Contender(ours, partial(_read_dataset, dataset, order, threads)),
            Contender(plain, partial(_read_mapped, mapped, ranges, order, threads)),
        ]
        for contender in contenders:
            contender.run()
        read = run_rounds("reader", contenders, setting.rounds)
        figures += [
            Figure("storage", who, "near", "ms a sample", tuple(1000 * s / len(order) for s in in_order(of)))
            for who, of in read.items()
        ]
        figures += ratios("storage", f"time, {ours} / {plain}", "near", read[ours], read[plain])
    return figures


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_dataset(dataset: CapturedDataset, order: Sequence[int], threads: int) -> float:
    with _threads(threads):
        start = time.perf_counter()
        for index in order:
            dataset[index]
        return time.perf_counter() - start


def _read_mapped(mapped: Columns, ranges: Sequence[tuple[int, int]], order: Sequence[int], threads: int) -> float:
    with _threads(threads):
        start = time.perf_counter()
        for index in order:
            first, stop = ranges[index]
            _ = {name: tensor[first:stop].clone() for name, tensor in mapped.items()}
        return time.perf_counter() - start


def _mapped(shard: Path, columns: Columns) -> Columns:
    """`columns` as views of one memory map of the file, placed by its header alone."""
    with shard.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    header, mapped = json.loads(data[8:start]), {}
    for name, tensor in columns.items():
        begin, end = header[name]["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=start + begin)
        mapped[name] = flat.view(tensor.dtype).view(tensor.shape)
    return mapped


def _ranges(samples: Samples) -> list[tuple[int, int]]:
    """First row and the one after the last of every sample: a shard holds its samples by length, then input order."""
    lengths = np.array([len(ids) for ids in samples.ids])
    order = np.argsort(lengths, kind="stable")
    stops = np.empty_like(lengths)
    stops[order] = np.cumsum(lengths[order])
    return [(int(stop - length), int(stop)) for stop, length in zip(stops, lengths, strict=True)]
