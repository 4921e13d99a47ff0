"""How fast a run can go, learnt while it works: the size of its batches, and whether compiled layers are worth their price.

Both are tried out on the run's own batches, so no forward is wasted on it, and remembered for the next run of the same model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch._dynamo.exc import TorchDynamoException

from ..outputs import DeviceAuxiliaryOutput
from .batches import MOST_PADDING, TokenBatch
from .budget import TokenBudget
from .engine import Engine
from .settings import CompileMode
from .speeds import Speed

# Before compiled layers were ever measured here: what they are taken to save, and to cost once. A run shorter than this makes
# worth while does not try them.
EXPECTED_GAIN = 0.25
EXPECTED_COST_S = 60.0


class CompilingEngine(Engine, Protocol):
    """An engine whose layers can be compiled."""

    def set_compiled(self, compiled: bool) -> None:
        """Run layers compiled, or as they are, from the next forward on."""


class Told(Protocol):
    """Is told one line worth reading."""

    def __call__(self, text: str) -> None: ...


class Pace:
    """Runs the batches of a run and decides, before each, how large it is and whether the layers are compiled."""

    most_padding = MOST_PADDING

    def __init__(
        self,
        engine: CompilingEngine,
        budget: TokenBudget,
        mode: CompileMode,
        tokens: int,
        note: Told,
        known: Speed | None = None,
    ) -> None:
        """`budget`: one that has seen nothing. `tokens`: how many the run has to do. `known`: what an earlier run measured."""
        self._engine, self._mode, self._left, self._note = engine, mode, tokens, note
        self._sizes, self._fresh = budget.sizes, budget.again()
        self._known = known if known is not None and known.batch_tokens in budget.sizes else None
        eager = budget if self._known is None else TokenBudget.known(self._known.batch_tokens, self._known.eager)
        self._eager_budget = self._budget = eager
        self._tried: TokenBudget | None = None
        self._compiled = self._settled = False
        self._compile_seconds = 0.0
        if mode == "on":
            self._compile()

    @property
    def made_with(self) -> Mapping[str, Any]:
        return self._engine.made_with

    @property
    def batch_tokens(self) -> int | None:
        """The budget that was settled on, None while sizes are tried out."""
        return self._budget.chosen

    @property
    def measured(self) -> Speed | None:
        """What there is to remember for the next run; None where this one measured nothing that was not known.

        A size that was given is not remembered, nor one that a full device left: the next run may have more room.
        """
        eager, tried = self._eager_budget, self._tried
        if len(self._sizes) == 1 or eager.chosen not in self._sizes or eager.seconds_per_token is None:
            return None
        if tried is None or tried.chosen not in self._sizes or tried.seconds_per_token is None:
            return Speed(eager.chosen, eager.seconds_per_token) if self._known is None else None
        return Speed(
            eager.chosen,
            eager.seconds_per_token,
            tried.seconds_per_token,
            tried.chosen,
            round(self._compile_seconds, 1),
        )

    def next_size(self) -> int:
        """Positions of the next batch."""
        self._decide()
        return self._budget.next()

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:
        """Run `batch`, which was made under a budget of `size`, and learn from it."""
        start = time.perf_counter()
        try:
            output = self._engine.forward(batch)
        except TorchDynamoException as error:
            if self._mode == "on":
                raise
            self._give_up(f"compiling failed ({str(error).splitlines()[0]})")
            return self._engine.forward(batch)
        positions = batch.positions
        self._left -= positions.T
        # A vision tower ran too in a forward with images: it says nothing about the size of a batch.
        if not self._budget.settled and batch.inputs is None:
            if self._engine.device.type != "cpu":
                torch.accelerator.synchronize(self._engine.device)
            seconds = time.perf_counter() - start
            self._budget.observe(size, positions.T, positions.B * positions.S, seconds)
            if self._compiled:
                self._compile_seconds += seconds
        return output

    def limit(self, failed: int) -> None:
        """A batch of `failed` positions did not fit the device; sizes that an earlier run found are tried out anew."""
        self._fresh.limit(failed)
        if self._known is None:
            self._budget.limit(failed)
        else:
            self._known = None
            self._begin(self._fresh.again())

    def _decide(self) -> None:
        if self._mode != "auto" or self._settled or self._eager_budget.seconds_per_token is None:
            return
        if not self._compiled:
            self._settled = not self._pays()
            if not self._settled:
                self._compile()
        elif self._budget.settled:
            self._settled = True
            self._judge()

    def _pays(self) -> bool:
        """Whether what compiled layers save over the tokens that are left covers what compiling costs."""
        eager = self._eager_budget.seconds_per_token or 0.0
        if self._known is None or self._known.compiled is None or self._known.compile_seconds is None:
            return self._left * eager * EXPECTED_GAIN > EXPECTED_COST_S
        return self._left * (eager - self._known.compiled) > self._known.compile_seconds

    def _judge(self) -> None:
        eager, compiled = self._eager_budget.seconds_per_token, self._budget.seconds_per_token
        if eager is not None and compiled is not None and compiled >= eager:
            self._give_up("compiled layers are no faster here")

    def _compile(self) -> None:
        self._compiled, known = True, self._known
        if known is not None and known.compiled is not None and known.compiled_batch_tokens in self._fresh.sizes:
            self._budget = TokenBudget.known(known.compiled_batch_tokens, known.compiled)
        else:
            self._begin(self._fresh.again())
        self._engine.set_compiled(True)

    def _begin(self, budget: TokenBudget) -> None:
        """Try sizes out, for layers as they now run."""
        self._budget = budget
        if self._compiled:
            self._tried = budget
        else:
            self._eager_budget = budget

    def _give_up(self, why: str) -> None:
        self._compiled, self._settled, self._budget = False, True, self._eager_budget
        self._engine.set_compiled(False)
        self._note(f"{why}; going on with layers as they are")
