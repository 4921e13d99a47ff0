"""The peak of memory of a run above its loaded model, measured in a fresh process: `python -c "..." TESTS PLACE ARGUMENTS`."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
START = "import sys; sys.path.insert(0, sys.argv[1]); from support.peak_memory import report; report()"

# With the C library's own rule, which moves as blocks are freed, freed activations stay behind as holes: the same run took
# between 30 and 63 MB. So fixed, what is free has gone back, and the peak is what the run holds.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def peak_above_model(*arguments: object, place: str = "", given: dict[str, Any] | None = None) -> int:
    """Bytes that `hiddentap ARGUMENTS` took at most above what it had when the model was loaded, mapped files left out.

    place, given: a function of support.run_places that is called in the process of the run, before it, and its arguments.
    """
    job = json.dumps({"arguments": [str(a) for a in arguments], "place": place, "given": given or {}})
    command = [sys.executable, "-c", START, str(TESTS), job]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | ALLOCATOR)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.splitlines()[-1])


def report() -> None:
    """In the fresh process: run the command and print the peak."""
    from hiddentap.capture.cli import main
    from hiddentap.capture.run.engines.hugging_face import backend as hugging_face_backend
    from support import run_places

    job, load = json.loads(sys.argv[2]), hugging_face_backend.load_model
    at_load: dict[str, int] = {}

    def load_and_note(*arguments: object) -> object:
        loaded = load(*arguments)
        for parameter in loaded.model.parameters():
            parameter.sum()  # weights that are mapped come in
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
        at_load.update(status())
        return loaded

    hugging_face_backend.load_model = load_and_note
    if job["place"]:
        getattr(run_places, job["place"])(**job["given"])
    sys.argv = ["hiddentap", *job["arguments"]]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    now = status()
    mapped = max(now["RssFile"] - at_load["RssFile"], 0)
    sys.stdout.write(f"{now['VmHWM'] - at_load['VmRSS'] - mapped}\n")


def status() -> dict[str, int]:
    """Bytes by name of what /proc/self/status gives in kB."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
