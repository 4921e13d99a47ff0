"""The peaks of memory of runs with streamed weights, each above what the process held before it.

Measured in a fresh process: `python -c "..." TESTS SMALL DATA OUT BLOCK MODEL...`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.peak_memory import ALLOCATOR, TESTS, status

START = "import sys; sys.path.insert(0, sys.argv[1]); from support.streamed_peak import report; report()"
BATCH = 64  # positions


def streamed_peaks(small: Path, models: Sequence[Path], data: Path, out: Path, block: int) -> list[int]:
    """Bytes that a run of each of `models` took at most; `small`: a tiny model, whose run before brings in code and threads."""
    arguments = [str(TESTS), *map(str, (small, data, out, block, *models))]
    environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    peaks: list[int] = json.loads(ended.stdout.splitlines()[-1])
    return peaks


def report() -> None:
    """In the fresh process: run the small model, then the others, and print the peaks of these."""
    small, data, out, block, *models = sys.argv[2:]
    _capture(small, data, f"{out}-small", int(block))
    peaks = [_peak(model, data, f"{out}-{number}", int(block)) for number, model in enumerate(models)]
    sys.stdout.write(f"{json.dumps(peaks)}\n")


def _peak(model: str, data: str, out: str, block: int) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
    before = status()
    _capture(model, data, out, block)
    mapped = max(status()["RssFile"] - before["RssFile"], 0)
    return status()["VmHWM"] - before["VmRSS"] - mapped


def _capture(model: str, data: str, out: str, block: int) -> None:
    from hiddentap import CaptureSettings, ModelSource, capture_dataset

    asked = {
        "layer_ids": (0, 2),
        "stream_weights": True,
        "block_tokens": block,
        "shard_rows": block,
        "batch_tokens": BATCH,
    }
    capture_dataset(CaptureSettings(ModelSource(model, device="cpu"), (data,), out, **asked))
