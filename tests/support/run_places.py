"""What tests do inside a run of the command: see where it is, kill it there, disturb its model or its disk.

Each function here is called in the process of the run, before the command.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiddentap import CapturedDataset
from hiddentap.capture.run import planning
from hiddentap.capture.run.distributed import tensor_group
from hiddentap.capture.run.engines.hugging_face import backend as hugging_face_backend
from hiddentap.capture.run.engines.hugging_face import streamed as streamed_backend
from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine
from hiddentap.capture.store import OutputFolder, PlannedShardWriter, PlanWriter
from hiddentap.capture.verify import verify
from hiddentap.models.loading import LoadedModel
from support.shards import write_folder

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


def one_rank(rank: int, size: int, port: int, then: dict[str, dict[str, Any]]) -> None:
    """One of several processes, as torchrun starts them; the store they meet in listens on `port`.

    then: other functions of this module, by name, with what they are given.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    for name, given in then.items():
        globals()[name](**given)


def layers_noted(folder: str) -> None:
    """Each decoder layer adds a byte to a file of its own, named after rank and layer, when it runs in a forward of the run."""
    load, forward, running = hugging_face_backend.load_model, HuggingFaceEngine.forward, [False]

    def noted(number: int) -> Function:
        def note(_module: nn.Module, _args: object, _output: object) -> None:
            if running[0]:
                with Path(folder, f"rank-{os.environ['RANK']}-layer-{number}").open("a") as file:
                    file.write(".")

        return note

    def load_noted(*arguments: Any) -> LoadedModel:
        loaded = load(*arguments)
        for number, layer in enumerate(loaded.model.model.layers):
            layer.register_forward_hook(noted(number))
        return loaded

    def run(self: HuggingFaceEngine, batch: Any) -> Any:
        running[0] = True
        return forward(self, batch)

    hugging_face_backend.load_model, HuggingFaceEngine.forward = load_noted, run


def memory_for(positions: int, only: int | None = None, patience: float = 120.0) -> None:
    """Forwards of more positions do not fit, on every rank or on one; the others are waited for `patience` seconds."""
    forward = HuggingFaceEngine.forward
    tensor_group._SETTLED_WITHIN_S = patience

    def limited(self: HuggingFaceEngine, batch: Any) -> Any:
        if batch.input_ids.numel() > positions and only in (None, int(os.environ["RANK"])):
            raise torch.OutOfMemoryError("no room")
        return forward(self, batch)

    HuggingFaceEngine.forward = limited


def bad_kernel(only: int, number: int, signal_instead: int = 0) -> None:
    """The forward of that number raises on one rank alone, in the middle of the model; or a signal comes there."""
    forward, calls = HuggingFaceEngine.forward, [0]

    def count(engine: HuggingFaceEngine, batch: Any) -> Any:
        calls[0] += 1
        return forward(engine, batch)

    def fail(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        if calls[0] == number and int(os.environ["RANK"]) == only:
            if not signal_instead:
                raise ValueError("the kernel is bad")
            os.kill(os.getpid(), signal_instead)
        return output

    HuggingFaceEngine.forward = count
    _after_layer_2(fail)


def many_shards_with_few_files(folder: str, shards: int, files: int) -> None:
    """Write so many shards, read every sample and verify them, with at most so many files open at a time; the process opens none
    beside those that it starts with."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    data = CapturedDataset(write_folder(Path(folder), shards))
    assert sorted({data[i]["sample_id"] for i in range(len(data))}) == sorted(f"s{i}" for i in range(shards))
    assert not [finding.what for finding in verify(folder, model="none").findings if "open" in finding.what]


def _after_layer_2(hook: Function) -> None:
    load, load_streamed = hugging_face_backend.load_model, streamed_backend.load_layer_by_layer

    def load_hooked(*arguments: Any) -> LoadedModel:
        loaded = load(*arguments)
        loaded.model.model.layers[2].register_forward_hook(hook)
        return loaded

    def load_streamed_hooked(*arguments: Any, **options: Any) -> Any:
        loaded, store = load_streamed(*arguments, **options)
        loaded.model.model.layers[2].register_forward_hook(hook)
        return loaded, store

    hugging_face_backend.load_model, streamed_backend.load_layer_by_layer = load_hooked, load_streamed_hooked


def _first(before: Callable[[], object], function: Function) -> Function:
    """`function`, with `before` called first."""

    def call(*arguments: Any, **options: Any) -> Any:
        before()
        return function(*arguments, **options)

    return call
