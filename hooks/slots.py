"""Fixed slots for the tensors that hooks see, filled once per forward."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Slots(Protocol):
    """One place per tap, filled by `store` in whatever order the model runs."""

    def store(self, slot: int, state: Tensor) -> None:
        """Keep `state` (B, S, H) for tap `slot`, in memory that the model does not own."""

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Return what is kept so far."""


class ClonedStates:
    """Whole states, one clone per tap; gradients flow through where autograd is on."""

    def __init__(self, count: int) -> None:
        self.states: list[Tensor | None] = [None] * count

    def store(self, slot: int, state: Tensor) -> None:
        # A clone, since a later in-place add or a reused output buffer would change a mere reference.
        self.states[slot] = state.clone()

    @property
    def held(self) -> tuple[Tensor, ...]:
        return tuple(state for state in self.states if state is not None)


class GatheredRows:
    """The real rows of every tap, gathered by the hook itself: nothing else is kept, nothing is copied twice.

    Attributes:
        aux_hidden_states: (T, K, H), or None until the first tap fired.
        norms: (T, H) of each norm tap, by slot.
    """

    def __init__(self, K: int, index: Tensor | None, T: int) -> None:
        """`index`: (T,) int64 into the flattened batch, on the device of the states; None where all T positions are real."""
        self.K, self.T = K, T
        self.aux_hidden_states: Tensor | None = None
        self.norms: dict[int, Tensor] = {}
        self._index = index

    def store(self, slot: int, state: Tensor) -> None:
        rows = state.detach().reshape(-1, state.shape[-1])
        if slot >= self.K:
            self.norms[slot] = self._gathered(rows)
            return
        if self.aux_hidden_states is None:
            self.aux_hidden_states = rows.new_empty(self.T, self.K, rows.shape[1])
        target = self.aux_hidden_states[:, slot]
        if self._index is None:
            target.copy_(rows)
        elif rows.device == target.device:
            torch.index_select(rows, 0, self._index.to(rows.device), out=target)
        else:  # a model spread over several devices: its rows meet on the device of the first tap
            target.copy_(self._gathered(rows))

    @property
    def held(self) -> tuple[Tensor, ...]:
        return (*(() if self.aux_hidden_states is None else (self.aux_hidden_states,)), *self.norms.values())

    def _gathered(self, rows: Tensor) -> Tensor:
        if self._index is None:
            return rows.clone(memory_format=torch.contiguous_format)
        return rows.index_select(0, self._index.to(rows.device))
