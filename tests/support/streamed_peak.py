"""The peak of memory of a run with streamed weights above a process that has only imported what it needs.

Measured in a fresh process: `python -c "..." TESTS SMALL MODEL DATA OUT BLOCK`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

from support.peak_memory import ALLOCATOR, TESTS, status

START = "import sys; sys.path.insert(0, sys.argv[1]); from support.streamed_peak import report; report()"


def streamed_peak(small: Path, model: Path, data: Path, out: Path, block: int) -> int:
    """Bytes that a run took at most; `small`: a tiny model, whose run before brings in code and threads."""
    arguments = [str(TESTS), *map(str, (small, model, data, out, block))]
    environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.splitlines()[-1])


def report() -> None:
    """In the fresh process: run both models and print the second one's peak."""
    small, model, data, out, block = sys.argv[2:]
    _capture(small, data, f"{out}-small", int(block))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
    before = status()
    _capture(model, data, out, int(block))
    mapped = max(status()["RssFile"] - before["RssFile"], 0)
    sys.stdout.write(f"{status()['VmHWM'] - before['VmRSS'] - mapped}\n")


def _capture(model: str, data: str, out: str, block: int) -> None:
    from hiddentap import CaptureSettings, ModelSource, capture_dataset

    asked = {
        "layer_ids": (0, 2),
        "stream_weights": True,
        "block_tokens": block,
        "shard_rows": block,
        "batch_tokens": 128,
    }
    capture_dataset(CaptureSettings(ModelSource(model, device="cpu"), (data,), out, **asked))
