"""The pace of a run: the size of its next batch, and whether layers are compiled; fixed, or learned from its own batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch._dynamo.exc import TorchDynamoException

from ....models.choices import CompileMode
from ...outputs import DeviceAuxiliaryOutput
from ..batches import MOST_PADDING, TokenBatch
from ..engine import CompilingEngine, Engine
from .budget import TokenBudget
from .speeds import Speed

# Before compiled layers were ever measured here: what they are taken to save, and to cost once. A run shorter than this makes
# worth while does not try them.
EXPECTED_GAIN = 0.25
EXPECTED_COST_S = 60.0


class Pacer(Protocol):
    """Sizes the batches of a run and runs them.

    Attributes:
        most_padding: share of a batch's positions that may be padding.
        batch_tokens: the budget of positions that every batch gets from now on; None while sizes are tried out, and where
            samples are run one by one.
    """

    @property
    def most_padding(self) -> float: ...
    @property
    def batch_tokens(self) -> int | None: ...

    def next_size(self) -> int:
        """Return how many positions the next batch may have."""

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:
        """Run `batch`, which was cut under a budget of `size` positions, and learn from it."""

    def limit(self, failed: int) -> None:
        """Make later batches smaller: one of `failed` positions, of several samples, did not fit the device."""

    def remember(self) -> None:
        """Keep what was learnt for the next run of this model on this device."""


class OneByOne:
    """Runs every sample in a forward of its own."""

    most_padding = 0.0
    batch_tokens = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def next_size(self) -> int:
        return 1

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:  # noqa: ARG002 - always the same
        return self._engine.forward(batch)

    def limit(self, failed: int) -> None:
        """Nothing is smaller than one sample, and `run_batches` ends a run whose single sample does not fit."""

    def remember(self) -> None:
        """Nothing was learnt."""


class SteadyPace:
    """Runs batches of `batch_tokens` positions, or of fewer once one did not fit.

    For an engine that takes each sample of a batch by itself: samples of any lengths go together.
    """

    most_padding = 1.0

    def __init__(self, engine: Engine, batch_tokens: int) -> None:
        self._engine, self.batch_tokens = engine, batch_tokens

    def next_size(self) -> int:
        return self.batch_tokens

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:  # noqa: ARG002 - of every size the same
        return self._engine.forward(batch)

    def limit(self, failed: int) -> None:
        self.batch_tokens = failed // 2

    def remember(self) -> None:
        """Nothing was learnt."""


class Pace:
    """Decides before each batch how large it is and whether the layers are compiled.

    Both are tried out on the run's own batches, so no forward is wasted on it.
    """

    most_padding = MOST_PADDING

    def __init__(
        self,
        engine: CompilingEngine,
        budget: TokenBudget,
        mode: CompileMode,
        tokens: int,
        note: Callable[[str], None],
        known: Speed | None = None,
        keep: Callable[[Speed], None] | None = None,
    ) -> None:
        """Begin with a `budget` that has seen nothing.

        tokens: how many the run has to do. known: what an earlier run measured. keep: stores what this one measures.
        """
        self._engine, self._mode, self._left, self._note = engine, mode, tokens, note
        self._sizes, self._fresh = budget.sizes, budget.again()
        self._keep = keep
        self._known = known if known is not None and known.batch_tokens in budget.sizes else None
        eager = budget if self._known is None else TokenBudget.known(self._known.batch_tokens, self._known.eager)
        self._eager_budget = self._budget = eager
        self._tried: TokenBudget | None = None
        self._compiled = self._settled = False
        self._compile_seconds = 0.0
        if mode == "on":
            self._compile()

    @property
    def batch_tokens(self) -> int | None:
        return self._budget.chosen

    @property
    def measured(self) -> Speed | None:
        """Return what to remember for the next run, or None if this run measured nothing new.

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
        self._decide()
        return self._budget.next()

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:
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
        # A forward with images ran a vision tower too, and one of a chunk read a cache: they say nothing about sizes of batches.
        if not self._budget.settled and batch.inputs is None and batch.chunk is None:
            if self._engine.device.type != "cpu":
                torch.accelerator.synchronize(self._engine.device)
            seconds = time.perf_counter() - start
            self._budget.observe(size, positions.T, positions.B * positions.S, seconds)
            if self._compiled:
                self._compile_seconds += seconds
        return output

    def limit(self, failed: int) -> None:
        """Drop the sizes from `failed` on; sizes that an earlier run found are tried out anew."""
        self._fresh.limit(failed)
        if self._known is None:
            self._budget.limit(failed)
        else:
            self._known = None
            self._begin(self._fresh.again())

    def remember(self) -> None:
        """Keep what was measured; a cache folder that cannot be written is worth a note and no more."""
        if self._keep is None or self.measured is None:
            return
        try:
            self._keep(self.measured)
        except OSError as error:
            self._note(f"measured speeds were not kept for the next run: {error}")

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
        """Return whether compiled layers save more over the remaining tokens than compilation costs."""
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
