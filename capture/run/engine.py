"""The forward of an offline run, behind one small interface: another way to run a model is one more file beside this one."""

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
        """Where the captured tensors are made."""

    @property
    def made_with(self) -> Mapping[str, Any]:
        """What headers say of the device and the way of computing."""

    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        """The hidden states of every real position of `batch`, and their faults, as one auxiliary output."""
