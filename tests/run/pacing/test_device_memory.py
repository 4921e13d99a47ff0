"""A forward that does not fit: told apart from one that is wrong, and tried again with fewer samples."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddentap import CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.progress import Silent
from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine
from hiddentap.capture.run.pacing.device_memory import unless_out_of_memory
from hiddentap.models.errors import RunError
from support.model_folder import chat, write_rows

FULL = (
    "[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError(FULL),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["accelerator", "python", "cpu", "cublas"],
)
def test_what_says_that_memory_is_full_is_none(error: Exception) -> None:
    def raising() -> int:
        raise error

    assert unless_out_of_memory(raising) is None
    assert unless_out_of_memory(lambda: 3) == 3


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), RunError(f"a tool failed: {FULL}"), ValueError("x")])
def test_every_other_error_is_raised(error: Exception) -> None:
    def raising() -> int:
        raise error

    with pytest.raises(type(error)) as raised:
        unless_out_of_memory(raising)
    assert raised.value is error


def test_torch_says_so_in_these_words_where_the_system_has_no_memory() -> None:
    """In a process of its own, whose address space is bounded."""
    code = (
        "import resource, torch\n"
        "from hiddentap.capture.run.pacing.device_memory import unless_out_of_memory\n"
        "torch.ones(10) @ torch.ones(10)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))\n"
        "print(unless_out_of_memory(lambda: torch.empty(1 << 30, dtype=torch.uint8)))\n"
        "print(unless_out_of_memory(lambda: torch.zeros(1 << 20).sum().item()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["None", "0.0"], ended.stderr
    assert resource.getpagesize() > 0


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_an_allocation_of_the_cpu_that_fails_halves_the_batch_with_one_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, ran = HuggingFaceEngine.forward, []

    def limited(self: HuggingFaceEngine, batch: Any) -> Any:
        if batch.input_ids.numel() > 700:
            raise RuntimeError(FULL)
        ran.append(batch.input_ids.numel())
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceEngine, "forward", limited)
    data = write_rows(tmp_path / "rows.jsonl", [chat("q", "a" * 20, id=f"{i}") for i in range(20)])
    notes = Notes()
    given = {"layer_ids": (0, 2), "batch_tokens": 1024}
    summary = capture_dataset(CaptureSettings(ModelSource(str(llama)), (str(data),), tmp_path / "out", **given), notes)
    assert (summary.captured, max(ran) <= 700) == (20, True)
    assert sum("did not fit cpu; trying smaller ones" in note for note in notes.notes) == 1
