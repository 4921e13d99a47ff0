"""The forward of an offline run, behind one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..outputs import DeviceAuxiliaryOutput
from .batches import TokenBatch


class Engine(Protocol):
    """Runs batches of prompts and gives what was captured."""

    @property
    def device(self) -> torch.device:
        """Return the device on which the captured tensors are made."""

    @property
    def made_with(self) -> Mapping[str, Any]:
        """Provenance for the shard header: the device, and how it computes."""

    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        """Return the hidden states of every real position of `batch`, and their faults, as one auxiliary output.

        A batch with a `chunk` is a part of one sample, given after the parts before it. An engine that cannot compute it behind
        those refuses `prefill_chunk` in its `EngineKind`.
        """


class CompilingEngine(Engine, Protocol):
    """An engine whose layers can be compiled."""

    def set_compiled(self, compiled: bool) -> None:
        """Run layers compiled, or as they are, from the next forward on."""
