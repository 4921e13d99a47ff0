"""What tests do inside a run of the command: see where it is, kill it there, disturb its model or its disk.

Each function here is called in the process of the run, before the command.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiddentap.capture.run import offline, planning
from hiddentap.capture.run.hugging_face import HuggingFaceEngine
from hiddentap.capture.store import OutputFolder, PlannedShardWriter, PlanWriter
from hiddentap.models.loading import LoadedModel, ModelSource

STAGES = ("loading", "tokenising", "planning", "forward", "seal", "manifest")
_FORMAT = "<dBB"  # when the run began, its stage, whether a seal goes on behind the forward

Function = Callable[..., Any]


class Place:
    """Where a run is, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(struct.calcsize(_FORMAT)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    @property
    def began(self) -> float:
        """In seconds of time.monotonic, which all processes share; 0 before it began."""
        return float(struct.unpack(_FORMAT, self._map)[0])

    @property
    def stage(self) -> str:
        return STAGES[self._map[8]]

    @property
    def stages(self) -> set[str]:
        """The stage, and the seal behind it."""
        return {self.stage} | ({"seal"} if self._map[9] else set())

    def begin(self) -> None:
        self._map[:8] = struct.pack("<d", time.monotonic())

    def enter(self, stage: str) -> None:
        self._map[8] = STAGES.index(stage)

    def seal(self, going_on: bool) -> None:
        self._map[9] = going_on


def watched(place: str, poison: int, kill_in: str = "", kill_at: int = 0) -> None:
    """Write where the run is to the file `place`; layer 2 gives an inf for samples of `poison` tokens.

    kill_in, kill_at: SIGKILL before the so-manieth step in that stage; steps are samples, forwards, writes and syncs.
    """
    where, sealing, left = Place(Path(place)), threading.local(), [kill_at]

    def step() -> None:
        stage = "seal" if getattr(sealing, "here", False) else where.stage
        if stage == kill_in:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def seal(self: PlannedShardWriter, real: Function = PlannedShardWriter.seal) -> Any:
        sealing.here = True
        where.seal(True)
        sealed = real(self)
        where.seal(False)
        sealing.here = False
        return sealed

    def entering(stage: str, function: Function) -> Function:
        return _first(lambda: (where.enter(stage), step()), function)

    def tokenised(*arguments: Any, real: Function = planning.tokenise, **options: Any) -> Iterator[Any]:
        where.enter("tokenising")
        for item in real(*arguments, **options):
            step()
            yield item

    planning.tokenise = tokenised
    PlanWriter.seal = entering("planning", PlanWriter.seal)
    HuggingFaceEngine.forward = entering("forward", HuggingFaceEngine.forward)
    PlannedShardWriter.seal = seal
    OutputFolder.write_rejects = entering("manifest", OutputFolder.write_rejects)
    os.pwrite, os.fsync = _first(step, os.pwrite), _first(step, os.fsync)
    inf_in_samples_of(poison)
    where.begin()


def inf_in_samples_of(length: int) -> None:
    """Layer 2 gives an inf at token 4 of samples of this length."""

    def poison(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        if output.shape[1] == length:
            output = output.clone()
            output[0, 4, 7] = torch.inf
        return output

    _after_layer_2(poison)


def error_in_forward(number: int, note: str) -> None:
    """The model raises in its forward of that number, those of loading left out; when, is written to the file `note`."""
    forward, calls = HuggingFaceEngine.forward, [0]

    def count(engine: HuggingFaceEngine, batch: Any) -> Any:
        calls[0] += 1
        return forward(engine, batch)

    def fail(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        if calls[0] == number:
            Path(note).write_text(str(time.monotonic()))
            raise ValueError("the kernel is bad")
        return output

    HuggingFaceEngine.forward = count
    _after_layer_2(fail)


def slow_disk(seconds: float) -> None:
    """Every write of hidden states to a shard takes so long; one in three takes no time."""
    write, calls = PlannedShardWriter.write, [0]

    def slow(self: PlannedShardWriter, row_start: int, rows: Any) -> None:
        calls[0] += 1
        if "aux_hidden_states" in rows and calls[0] % 3:
            time.sleep(seconds)
        write(self, row_start, rows)

    PlannedShardWriter.write = slow


def _after_layer_2(hook: Function) -> None:
    load = offline.load_model

    def load_hooked(source: ModelSource) -> LoadedModel:
        loaded = load(source)
        loaded.model.model.layers[2].register_forward_hook(hook)
        return loaded

    offline.load_model = load_hooked


def _first(before: Callable[[], object], function: Function) -> Function:
    """`function`, with `before` called first."""

    def call(*arguments: Any, **options: Any) -> Any:
        before()
        return function(*arguments, **options)

    return call
