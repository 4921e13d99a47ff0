"""Batches of one size, for an engine that orders its own work inside each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..outputs import DeviceAuxiliaryOutput
from .batches import TokenBatch
from .engine import Engine


class SteadyPace:
    """Runs batches of `batch_tokens` positions, or of fewer once one did not fit; nothing is tried out."""

    measured = None
    """Nothing is learnt that a later run could use."""
    most_padding = 1.0
    """The engine takes each sample by itself, so samples of any lengths go together."""

    def __init__(self, engine: Engine, batch_tokens: int) -> None:
        self._engine, self.batch_tokens = engine, batch_tokens

    @property
    def made_with(self) -> Mapping[str, Any]:
        return self._engine.made_with

    def next_size(self) -> int:
        """Positions of the next batch."""
        return self.batch_tokens

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:  # noqa: ARG002 - of every size the same
        return self._engine.forward(batch)

    def limit(self, failed: int) -> None:
        """A batch of `failed` positions did not fit."""
        self.batch_tokens = failed // 2
