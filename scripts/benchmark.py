"""Measures this project's run beside bare forwards and beside other tools' strategies, and prints one Markdown table.

    python scripts/benchmark.py [--model FOLDER] [--rounds N] [--seconds S] [--only SECTION ...] [--json FILE] [--quick]

Everything is measured in one go: contenders take turns, round after round, and ratios are of pairs of one round. Without
--model it needs the folder that scripts/smollm2.py makes. docs/benchmarks.md says what each line means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import torch
from benchmarking.device import device, generation
from benchmarking.early_stop import early_stop
from benchmarking.figures import Figure, markdown
from benchmarking.memory import growth, memory
from benchmarking.operations import operations
from benchmarking.samples import DATA_SETS
from benchmarking.setting import Setting
from benchmarking.speed import speed
from benchmarking.storage import storage
from benchmarking.streamed import streamed
from smollm2 import default_folder

from hiddentap.models.choices import CpuFastPaths

SECTIONS: dict[str, Callable[[Setting], list[Figure]]] = {
    "operations": operations,
    "speed": speed,
    "early-stop": early_stop,
    "storage": storage,
    "memory": memory,
    "growth": growth,
    "device": device,
    "generation": generation,
    "streamed": streamed,
}
# It makes a model of its own and needs the right to make control groups.
ONLY_IF_ASKED = ("streamed",)


def main() -> None:
    asked = arguments()
    setting = setting_of(asked)
    default = [name for name in SECTIONS if name not in ONLY_IF_ASKED]
    figures = [figure for name in asked.only or default for figure in SECTIONS[name](setting)]
    about = machine(setting)
    print("\n".join(f"- {name}: {value}" for name, value in about.items()), end="\n\n")
    print(markdown(figures))
    if asked.json:
        text = json.dumps({"about": about, "figures": [figure.as_json() for figure in figures]}, indent=1)
        asked.json.write_text(text + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id (default: the SmolLM2 folder)")
    parser.add_argument(
        "--layers", help="0-based decoder layers, such as 1,14,26 (default: an early, a middle, a late one)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each section (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one eager run (default: %(default)s)")
    parser.add_argument(
        "--others-every",
        type=int,
        default=3,
        metavar="N",
        help="other tools run in every N-th round (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-tokens", type=int, metavar="N", help="positions of a batch (default: what a run finds)"
    )
    parser.add_argument(
        "--attn-implementation", metavar="NAME", help="of hiddentap and the floor (default: as transformers chooses)"
    )
    parser.add_argument(
        "--cpu-fast-paths",
        choices=get_args(CpuFastPaths),
        default="auto",
        help="of hiddentap and the floor, as `hiddentap capture` takes it (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="of every contender (default: as the config says)")
    parser.add_argument(
        "--device", default="auto", help="of every contender (default: the accelerator, where there is one)"
    )
    parser.add_argument(
        "--data", choices=DATA_SETS, action="append", help="one data set of the section speed (default: both)"
    )
    parser.add_argument(
        "--folder", type=Path, default=tempfile.gettempdir(), help="where files go (default: %(default)s)"
    )
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; may be given several times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there too")
    parser.add_argument(
        "--quick", action="store_true", help="a few batches and two rounds: shows that it works, no more"
    )
    return parser.parse_args()


def setting_of(asked: argparse.Namespace) -> Setting:
    return Setting(
        model=asked.model or str(default_folder()),
        layers=tuple(map(int, asked.layers.split(","))) if asked.layers else None,
        rounds=2 if asked.quick else asked.rounds,
        seconds=1.0 if asked.quick else asked.seconds,
        others_every=1 if asked.quick else asked.others_every,
        batch_tokens=asked.batch_tokens or (256 if asked.quick else None),
        dtype=asked.dtype,
        attention=asked.attn_implementation,
        cpu_fast_paths=asked.cpu_fast_paths,
        data_sets=tuple(asked.data or DATA_SETS),
        folder=asked.folder,
        quick=asked.quick,
        device=asked.device,
    )


def machine(setting: Setting) -> dict[str, str]:
    """What the figures depend on."""
    loaded = setting.loaded
    device = setting.source.torch_device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    libraries = [f"{name} {version(name)}" for name in ("hiddentap", "torch", "transformers", "safetensors")]
    return {
        "model": f"{loaded.model.config.name_or_path}, {setting.n} layers, computing in {str(loaded.model.dtype)[6:]}",
        "attention": setting.attention or "as transformers chooses",
        "CPU fast paths": setting.cpu_fast_paths,
        "layers": f"{', '.join(map(str, setting.chosen_layers))} (0-based) and what enters the final norm",
        "device": f"{kind}; {processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "libraries": f"{', '.join(libraries)}, Python {platform.python_version()}",
        "rounds": f"{setting.rounds}, of about {setting.seconds:g} s of eager work; other tools in every {setting.others_every}",
    }


def processor() -> str:
    """The processor's name where the system tells it."""
    lines: Sequence[str] = ()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
