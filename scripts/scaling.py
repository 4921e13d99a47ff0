"""How the cost of a capture grows with tokens, layers, width, shards and processes, on a random Llama that it makes itself.

    scripts/scaling.py [--rounds N] [--process-rounds N] [--folder DIR]

Each round runs every setting once; a figure is the median over the rounds of its ratio to the plain setting of the same round.
docs/scaling.md says what the lines mean.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

# One thread: what is measured is the work, not how a machine with other work shares its cores.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import click
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from hiddentap import CaptureSettings, ModelSource, capture_dataset

VOCABULARY, LENGTH, BATCH_TOKENS = 1024, 256, 2048


@dataclass(frozen=True)
class Setting:
    """One run: a model of `depth` layers of width `width`, `samples` of 256 tokens, taps after `layer_ids`."""

    name: str
    width: int = 256
    depth: int = 8
    samples: int = 32
    layer_ids: tuple[int, ...] = (1, 4, 7)
    shard_rows: int = 4096


PLAIN = Setting("plain: H 256, 8 layers, 8,192 tokens, K 3, shards of 4,096 rows")
SETTINGS = (
    PLAIN,
    replace(PLAIN, name="tokens x 2", samples=64),
    replace(PLAIN, name="tokens x 4", samples=128),
    replace(PLAIN, name="layers x 2 (16)", depth=16, layer_ids=(1, 8, 15)),
    replace(PLAIN, name="last tap after layer 3 of 8", layer_ids=(0, 1, 3)),
    replace(PLAIN, name="K 1", layer_ids=(7,)),
    replace(PLAIN, name="K 8", layer_ids=tuple(range(8))),
    replace(PLAIN, name="width / 2 (H 128)", width=128),
    replace(PLAIN, name="width x 2 (H 512)", width=512),
    replace(PLAIN, name="shards of 256 rows (32 shards)", shard_rows=256),
    replace(PLAIN, name="shards of 1,024 rows (8 shards)", shard_rows=1024),
    replace(PLAIN, name="one shard", shard_rows=8192),
)
PROCESSES = replace(PLAIN, name="processes", samples=128)  # 8 shards


@dataclass
class Workshop:
    """Models and data, made once each, in a folder of their own."""

    folder: Path
    _made: set[Path] = field(default_factory=set)

    def model(self, setting: Setting) -> Path:
        path = self.folder / f"model-{setting.width}-{setting.depth}"
        if path not in self._made:
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=setting.width,
                intermediate_size=4 * setting.width,
                num_hidden_layers=setting.depth,
                num_attention_heads=setting.width // 64,
                num_key_value_heads=setting.width // 64,
                pad_token_id=None,
            )
            LlamaForCausalLM(config).save_pretrained(path)
            words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
            PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(path)
            self._made.add(path)
        return path

    def data(self, setting: Setting) -> Path:
        path = self.folder / f"data-{setting.samples}.jsonl"
        if path not in self._made:
            ids = torch.randint(VOCABULARY, (setting.samples, LENGTH), generator=torch.Generator().manual_seed(1))
            path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
            self._made.add(path)
        return path

    def empty(self) -> Path:
        """A folder to fill; whatever the run before it wrote is gone."""
        path = self.folder / "out"
        shutil.rmtree(path, ignore_errors=True)
        return path


def processor_seconds(workshop: Workshop, setting: Setting) -> float:
    """Seconds of processor time, of all threads, that a whole run takes in this process, loading and sealing included."""
    settings = CaptureSettings(
        ModelSource(str(workshop.model(setting)), device="cpu"),
        (str(workshop.data(setting)),),
        workshop.empty(),
        layer_ids=setting.layer_ids,
        final="none",
        batch_tokens=BATCH_TOKENS,
        compile="off",
        shard_rows=setting.shard_rows,
        cpu_fast_paths="auto",
    )
    start = time.process_time()
    capture_dataset(settings)
    return time.process_time() - start


def filling_seconds(workshop: Workshop, processes: int) -> tuple[float, float]:
    """Of a run by so many processes of one thread each: the time from the sealed plan to the last sealed shard, by the files'
    times, and the processor time of all from their start to their end."""
    out = workshop.empty()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    command += ["-m", "hiddentap", "capture", "--model", workshop.model(PROCESSES), "--data", workshop.data(PROCESSES)]
    command += [
        "--out",
        out,
        "--layer-ids",
        "1,4,7",
        "--final",
        "none",
        "--device",
        "cpu",
        "--compile",
        "off",
        "--quiet",
    ]
    command += ["--batch-tokens", BATCH_TOKENS, "--shard-rows", PROCESSES.shard_rows]
    before = _children_seconds()
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    last = max(path.stat().st_mtime for path in out.glob("shards/*.safetensors"))
    return last - (out / "plan" / "plan.json").stat().st_mtime, _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--process-rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where runs write  [default: the folder for temporary files]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        workshop = Workshop(Path(folder))
        if given.rounds:
            grown(workshop, given.rounds)
        if given.process_rounds:
            shared(workshop, given.process_rounds)


def grown(workshop: Workshop, rounds: int) -> None:
    """One line a setting: processor seconds, and the ratio to the plain one."""
    processor_seconds(workshop, PLAIN)  # the first run of a process warms up
    seen: dict[str, list[float]] = {setting.name: [] for setting in SETTINGS}
    for number in range(rounds):
        for setting in SETTINGS[number % len(SETTINGS) :] + SETTINGS[: number % len(SETTINGS)]:
            seen[setting.name].append(processor_seconds(workshop, setting))
    click.echo(f"processor time, one thread, median of {rounds} rounds; load {os.getloadavg()[1]:.1f}")
    for name, seconds in seen.items():
        ratios = [s / plain for s, plain in zip(seconds, seen[PLAIN.name], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        click.echo(f"{statistics.median(seconds):7.2f} s  x {statistics.median(ratios):.2f} ({spread})  {name}")


def shared(workshop: Workshop, rounds: int) -> None:
    """The time to fill a folder with one process and with two."""
    seen = [[filling_seconds(workshop, processes) for processes in (1, 2)] for _ in range(rounds)]
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
    click.echo(f"{PROCESSES.samples * LENGTH:,} tokens, 8 shards, median of {rounds} rounds; {machine}")
    for place, processes in enumerate((1, 2)):
        filling, processor = (statistics.median(one[place][kind] for one in seen) for kind in range(2))
        click.echo(f"{filling:7.2f} s to fill, {processor:7.2f} s of processor time  {processes} process(es)")
    ratios = [one[0] / two[0] for one, two in seen]
    click.echo(
        f"two fill {statistics.median(ratios):.2f} times as fast as one ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
