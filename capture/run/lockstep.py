"""One engine spread over a tensor group: the leader decides every forward, and the others run it with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from ...hooks import RealPositions
from ...models.errors import UsageError
from ..outputs import DeviceAuxiliaryOutput
from .batches import TokenBatch
from .hugging_face import HuggingFaceEngine
from .stopping import Stopping
from .tensor_group import TensorGroup

E = TypeVar("E")
_END, _FORWARD, _COMPILED = range(3)


class LeadingEngine:
    """The engine as the leader sees it: a forward here is a forward on every member.

    A batch that does not fit the memory of one member is an OutOfMemoryError here. A signal that a member got is asked of
    `stopping`, as if this process had got it.
    """

    def __init__(self, engine: HuggingFaceEngine, group: TensorGroup, stopping: Stopping) -> None:
        self._engine, self._group, self._stopping = engine, group, stopping
        self._in_step = False

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def made_with(self) -> dict[str, Any]:
        return self._engine.made_with | {"tensor_parallel": self._group.size}

    def set_compiled(self, compiled: bool) -> None:
        self._group.told(torch.tensor([_COMPILED, int(compiled), 0]))
        self._engine.set_compiled(compiled)

    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        positions = batch.positions
        self._in_step = True
        self._group.told(torch.tensor([_FORWARD, positions.B, positions.S]))
        self._group.told(torch.cat([torch.tensor(positions.lengths), batch.input_ids.reshape(-1)]))
        output = _forward_together(self._engine, batch, self._group, self._stopping)
        self._in_step = False
        if output is None:
            raise torch.OutOfMemoryError("the batch does not fit the memory of a process of the tensor-parallel group")
        return output

    def end(self) -> None:
        """Let the others go; where a forward broke off they are inside it, and learn of the end from their connections."""
        if not self._in_step:
            self._group.told(torch.tensor([_END, 0, 0]))


@contextmanager
def led(engine: E, group: TensorGroup, stopping: Stopping) -> Iterator[E | LeadingEngine | None]:
    """The engine that the leader drives; None on the other members, which have run all of its forwards by then."""
    if group.size == 1:
        yield engine
        return
    if not isinstance(engine, HuggingFaceEngine):
        raise UsageError(f"{type(engine).__name__} cannot be spread over a tensor-parallel group of processes.")
    if not group.leads:
        follow(engine, group, stopping)
        yield None
        return
    leader = LeadingEngine(engine, group, stopping)
    try:
        yield leader
    except BaseException:
        with suppress(RuntimeError):  # what ended the block is told, not what follows from it
            leader.end()
        raise
    leader.end()


def follow(engine: HuggingFaceEngine, group: TensorGroup, stopping: Stopping) -> None:
    """Run what the leader runs, until it is done."""
    while True:
        what, first, second = group.told(torch.zeros(3, dtype=torch.int64)).tolist()
        if what == _END:
            return
        if what == _COMPILED:
            engine.set_compiled(bool(first))
            continue
        B, S = first, second
        numbers = group.told(torch.zeros(B + B * S, dtype=torch.int64))
        positions = RealPositions(S, (0,) * B, tuple(numbers[:B].tolist()))
        _forward_together(engine, TokenBatch(0, 0, numbers[B:].reshape(B, S), positions), group, stopping)


def _forward_together(
    engine: HuggingFaceEngine, batch: TokenBatch, group: TensorGroup, stopping: Stopping
) -> DeviceAuxiliaryOutput | None:
    """One forward on every member; None where the memory of one did not hold it, once all are ready for another."""
    output = _forward(engine, batch)
    ran_out, signal = group.most([output is None, stopping.asked or 0], soon=output is None)
    if signal:
        stopping.ask(signal)
    if not ran_out:
        return output
    group.settle(engine.device)
    if engine.device.type != "cpu":
        torch.accelerator.empty_cache()
    return None


def _forward(engine: HuggingFaceEngine, batch: TokenBatch) -> DeviceAuxiliaryOutput | None:
    """None and not the exception, which would hold the failed forward's memory."""
    try:
        return engine.forward(batch)
    except torch.OutOfMemoryError:
        return None
