"""The forward of a batch by vLLM."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from .....hooks import RealPositions, TapError
from .....models.errors import RunError
from ....outputs import DeviceAuxiliaryOutput, RowLayout
from ...batches import TokenBatch
from ..row_check import RowCheck
from .arena import UNWRITTEN, RowArena
from .asked_states import AskedStates


class RowWriter(Protocol):
    """Something that computes prompts and has their rows written into the arena; `StatesOfPrompts` is one."""

    made_with: dict[str, Any]

    def compute(self, prompts: list[list[int]], rows: list[int]) -> None:
        """Compute each of `prompts` once, its states into the arena from the row of `rows` on."""


class VllmEngine:
    """Hands batches to vLLM as prompts and takes their rows from the arena, once each was seen to be of its own token.

    vLLM orders and packs the prompts of a batch itself, so a batch is large.
    """

    BATCH_TOKENS = 16_384

    def __init__(
        self,
        writer: RowWriter,
        arena: RowArena,
        asked: AskedStates,
        store_dtype: torch.dtype,
        tap_names: tuple[str, ...],
    ) -> None:
        """`tap_names`: what the taps are called where a fault of their rows is told, in slot order."""
        self._writer, self._arena, self._asked = writer, arena, asked
        self.device = torch.device("cpu")  # where the rows come to, whatever vLLM computes on
        self._check = RowCheck.of(asked.taps, store_dtype, tap_names, self.device)

    @property
    def made_with(self) -> dict[str, Any]:
        """Return what a shard records of vLLM and of its device."""
        return self._writer.made_with

    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        """Return the hidden states of every real position of `batch`, and their faults, as one auxiliary output.

        Raises:
            RunError: vLLM failed, or left rows out, or computed others than were asked for.
        """
        states = self._states(batch.input_ids, batch.positions)
        return self._check.output(self._asked.columns(states), RowLayout.of_prompts(batch.positions.lengths))

    def prove(self, vocab_rows: int) -> None:
        """See on a few tokens that vLLM gives each state that it was asked for.

        Raises:
            TapError: two of them are equal, so that one is missing and another is in its place.
        """
        S = min(vocab_rows, 8)
        states = self._states(torch.arange(S)[None], RealPositions.all(1, S))
        for i, (b, c) in enumerate(zip(self._asked.boundaries, self._asked.boundaries[1:], strict=False)):
            if torch.equal(states[:, i], states[:, i + 1]):
                raise TapError(
                    f"vLLM gives the same values for boundary {b} and boundary {c}, so it does not give one of them for this "
                    "model; leave that layer out, or take --engine hf."
                )

    def _states(self, input_ids: Tensor, positions: RealPositions) -> Tensor:
        """Return (T, states, H), in the arena, which the next batch overwrites."""
        lengths = positions.lengths
        prompts = [row[:length].tolist() for row, length in zip(input_ids, lengths, strict=True)]
        self._arena.clear(positions.T)
        self._writer.compute(prompts, list(accumulate(lengths[:-1], initial=0)))
        expected = torch.cat([row[:length] for row, length in zip(input_ids, lengths, strict=True)])
        _require_same(self._arena.token_ids[: positions.T], expected)
        return self._arena.states[: positions.T]


def _require_same(found: Tensor, expected: Tensor) -> None:
    """Raise RunError where a row is not of the token that it stands for. Both: (T,)."""
    wrong, missing = ((found != expected).nonzero()[:, 0], (found == UNWRITTEN).nonzero()[:, 0])
    if not len(wrong):
        return
    row = int(wrong[0])
    if len(missing):
        raise RunError(
            f"vLLM gave no hidden states for {len(missing)} of {len(expected)} tokens, the first at row {int(missing[0])} of its "
            "batch; such samples are not stored. Other engine options may help, or --engine hf."
        )
    raise RunError(
        f"vLLM gave hidden states of other tokens than were asked for: {len(wrong)} rows, the first at row {row} of its batch "
        f"with token {int(found[row])} in place of {int(expected[row])}; such rows are not stored."
    )
