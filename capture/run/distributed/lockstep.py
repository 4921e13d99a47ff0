"""One engine spread over a tensor group: the leader decides every forward, and the others run it with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ....hooks import RealPositions
from ...outputs import DeviceAuxiliaryOutput
from ..batches import TokenBatch
from ..engine import CompilingEngine
from ..pacing.device_memory import make_room, unless_out_of_memory
from ..stopping import Stopping
from .tensor_group import TensorGroup

_END, _FORWARD, _COMPILED = range(3)


class LeadingEngine:
    """The engine as the leader sees it: a forward here is a forward on every member.

    A batch that does not fit the memory of one member is an OutOfMemoryError here. A signal that a member got is asked of
    `stopping`, as if this process had got it.
    """

    def __init__(self, engine: CompilingEngine, group: TensorGroup, stopping: Stopping) -> None:
        self._engine, self._group, self._stopping = engine, group, stopping
        self._in_step = False

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def made_with(self) -> dict[str, Any]:
        return {**self._engine.made_with, "tensor_parallel": self._group.size}

    def set_compiled(self, compiled: bool) -> None:
        self._group.broadcast(torch.tensor([_COMPILED, int(compiled), 0]))
        self._engine.set_compiled(compiled)

    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        positions = batch.positions
        self._in_step = True
        self._group.broadcast(torch.tensor([_FORWARD, positions.B, positions.S]))
        self._group.broadcast(torch.cat([torch.tensor(positions.lengths), batch.input_ids.reshape(-1)]))
        output = _forward_together(self._engine, batch, self._group, self._stopping)
        self._in_step = False
        if output is None:
            raise torch.OutOfMemoryError("the batch does not fit the memory of a process of the tensor-parallel group")
        return output

    def end(self) -> None:
        """Let the others go; where a forward broke off they are inside it, and learn of the end from their connections."""
        if not self._in_step:
            self._group.broadcast(torch.tensor([_END, 0, 0]))


@contextmanager
def led(engine: CompilingEngine, group: TensorGroup, stopping: Stopping) -> Iterator[CompilingEngine | None]:
    """Yield the engine that the leader drives, or None on the other members, after all of its forwards.

    A group of one drives its engine directly, which then may be of any kind.
    """
    if group.size == 1:
        yield engine
        return
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


def follow(engine: CompilingEngine, group: TensorGroup, stopping: Stopping) -> None:
    """Run what the leader runs, until it is done."""
    while True:
        what, first, second = group.broadcast(torch.zeros(3, dtype=torch.int64)).tolist()
        if what == _END:
            return
        if what == _COMPILED:
            engine.set_compiled(bool(first))
            continue
        B, S = first, second
        numbers = group.broadcast(torch.zeros(B + B * S, dtype=torch.int64))
        positions = RealPositions(S, (0,) * B, tuple(numbers[:B].tolist()))
        _forward_together(engine, TokenBatch(0, numbers[B:].reshape(B, S), positions), group, stopping)


def _forward_together(
    engine: CompilingEngine, batch: TokenBatch, group: TensorGroup, stopping: Stopping
) -> DeviceAuxiliaryOutput | None:
    """Run one forward on every member; return None if one ran out of memory, once all are ready for another."""
    output = unless_out_of_memory(partial(engine.forward, batch))
    ran_out, signal = group.most([output is None, stopping.asked or 0], soon=output is None)
    if signal:
        stopping.ask(signal)
    if not ran_out:
        return output
    group.settle(engine.device)
    make_room(engine.device)
    return None
