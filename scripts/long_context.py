#!/usr/bin/env python
"""Measure what --prefill-chunk costs and saves: one long sample of a random Llama, whole and in chunks, each in a fresh process.

    python scripts/long_context.py --tokens 32768 --chunks 8192,2048

The model has the shape of SmolLM2-135M (H = 576, 9 heads, 3 of keys and values) with fewer layers and longer positions. Prints
a table: peak memory above a run of a sample of 16 tokens, seconds, and by how much of its length a row differs at most from
that of the whole forward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hiddentap import CapturedDataset

VOCABULARY, SHORT = 4096, 16
# Rows that are compared at a time.
ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the sample")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--chunks", default="8192,2048", help="values of --prefill-chunk to measure")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa", help="--attn-implementation")
    parser.add_argument("--work", type=Path, help="folder for model, data and rows  [default: a temporary one]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        write_model(work / "model", arguments.layers, arguments.tokens, getattr(torch, arguments.dtype))
        for name, tokens in (("short", SHORT), ("long", arguments.tokens)):
            write_sample(work / f"{name}.jsonl", tokens)
        base, _ = captured(work, "short", arguments)
        measured = {"whole": captured(work, "long", arguments)}
        for chunk in map(int, arguments.chunks.split(",")):
            measured[f"chunks of {chunk:,}"] = captured(work, "long", arguments, chunk)
        print(f"{arguments.tokens:,} tokens, {arguments.layers} layers, {arguments.dtype}, {arguments.attention}")
        print("| run | peak above a short sample | seconds | largest row difference |\n|---|---|---|---|")
        for name, (peak, seconds) in measured.items():
            change = largest_change(work / f"out-long-{name.split()[-1].replace(',', '')}", work / "out-long-whole")
            print(f"| {name} | {(peak - base) / 1e6:,.0f} MB | {seconds:.0f} | {change:.1e} |")


def write_model(folder: Path, layers: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, max_position_embeddings=max(tokens, 65536), pad_token_id=None, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def write_sample(path: Path, tokens: int) -> None:
    ids = torch.randint(8, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_text(json.dumps({"id": path.stem, "input_ids": ids}) + "\n")


def captured(work: Path, data: str, arguments: argparse.Namespace, chunk: int | None = None) -> tuple[int, float]:
    """Capture in a process of its own; return its peak of memory in bytes, and its seconds."""
    out = work / f"out-{data}-{chunk or 'whole'}"
    command = [
        sys.executable, "-c", "from hiddentap.capture.cli import main; main()", "capture", "--model", work / "model",
        "--data", work / f"{data}.jsonl", "--layer-ids", "1,3", "--attn-implementation", arguments.attention,
        "--max-length", arguments.tokens, "--device", "cpu", "--compile", "off", "--out", out, "--quiet",
        *(() if chunk is None else ("--prefill-chunk", chunk)),
    ]  # fmt: skip
    start = time.monotonic()
    process = subprocess.Popen([*map(str, command)])
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"the capture {out.name} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024, time.monotonic() - start


def largest_change(out: Path, whole: Path) -> float:
    found, expected = (CapturedDataset(folder)[0] for folder in (out, whole))
    worst = 0.0
    for name in ("aux_hidden_states", "pre_norm"):
        for one, other in zip(found[name].split(ROWS), expected[name].split(ROWS), strict=True):
            change = (one.double() - other.double()).norm(dim=-1) / other.double().norm(dim=-1)
            worst = max(worst, float(change.max()))
    return worst


if __name__ == "__main__":
    main()
