"""The states requested from vLLM, in its own ids, and the column that takes each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .....hooks import Taps
from .....models.id_systems import TappedState, ids_of


@dataclass(frozen=True)
class AskedStates:
    """The boundaries of `taps` in a model of n decoder layers, with n itself where pre-norm is wanted: vLLM's id n is that.

    vLLM gives each state once and in the order of the layers, so one that is both a boundary and pre-norm is asked for once.
    """

    taps: Taps
    n: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        pre_norm = {self.n} if self.taps.pre_norm else set()
        return tuple(sorted({*self.taps.boundaries, *pre_norm}))

    @property
    def vllm_ids(self) -> tuple[int, ...]:
        return ids_of([TappedState(b) for b in self.boundaries], self.n, "vllm")

    def columns(self, states: Tensor) -> dict[str, Tensor]:
        """states: (T, len(vllm_ids), H), copied into `aux_hidden_states` (T, K, H) and, as asked, `pre_norm` (T, H)."""
        K = len(self.taps.boundaries)  # strictly increasing and at most n: they are the first K of those asked for
        columns = {"aux_hidden_states": states[:, :K].clone()}
        if self.taps.pre_norm:
            columns["pre_norm"] = states[:, -1].clone()
        return columns
