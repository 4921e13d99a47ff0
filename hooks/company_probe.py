"""Tries a way of running: two sequences of different lengths in it, beside each alone, on a few tokens.

What is compared follows from what the way can change. Lengths that the config names are tried on both sides, as far as a run
may cost: see `_LONGEST_RUN`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from ..models.call import (
    cache_argument,
    cache_in,
    eagerly,
    evaluating,
    few_ids,
    new_cache,
    randomness_kept,
    without_cache,
)
from ..models.config import model_config, named_lengths, stated_positions
from ..models.decoder import Decoder
from ..models.length_limits import LengthLimits
from ..models.modules import unwrapped
from .collector import Collector
from .positions import counted_positions
from .rounding import computes_in_half, error_beyond_rounding, most_error, row_errors
from .slots import ClonedStates
from .ways import WAYS_OUT, WHY_FILLING, Way

# Runs forwards of one collector, each to the rows that it gives, and returns these in order.
AtOnce = Callable[[Collector, Sequence[Callable[[], list[Tensor]]]], list[list[Tensor]]]

_SHORT, _LONG = 4, 9
# Of the way that each run proves when it begins: as few tokens as show it.
_RUN_SHORT, _RUN_LONG = 3, 4
# Named lengths up to this one are run too; longer ones would cost more than a run gains.
_LONGEST_RUN = 128
# Positions that a sequence is moved by at most: rotary embeddings there still round little in float32.
_LARGEST_SHIFT = 9216
# Nothing but what stands in the padding differs: rows of half precision hardly move at all then.
_HALF_FILLING_TOLERANCE = 1e-2
# What models raise where they cannot be run so.
_RAISED = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)


def takes_position_ids(model: nn.Module) -> bool:
    """Return whether the forward of `model` has an argument of that name."""
    return "position_ids" in inspect.signature(type(unwrapped(model)).forward).parameters


def one_after_the_other(_collector: Collector, forwards: Sequence[Callable[[], list[Tensor]]]) -> list[list[Tensor]]:
    """Run `forwards` of a model that is whole in memory."""
    return [forward() for forward in forwards]


class CompanyProbe:
    """Compares one model with itself; each way of running that it is asked for is run anew."""

    def __init__(
        self,
        decoder: Decoder,
        collector: Collector,
        limits: LengthLimits,
        quietly: Callable[[], AbstractContextManager[None]],
        at_once: AtOnce,
    ) -> None:
        self._decoder, self._collector, self._limits, self._quietly = decoder, collector, limits, quietly
        self._at_once = at_once
        self._half = computes_in_half(decoder.model)

    @torch.no_grad()
    def fault(self, way: Way) -> str | None:
        """Return why rows that run this way are not those of their sequences alone; None where they are."""
        model = self._decoder.model
        with self._quietly(), self._attached(), evaluating(model), randomness_kept(model), eagerly(model):
            if "cache" in way:
                return self._fault_in_steps(way)
            for lengths in self._pairs_of_lengths(way):
                what = f"sequences of {lengths[0]} and {lengths[1]} tokens"
                fault = self._fault_or_error(way, what, partial(self._compared, way, lengths))
                if fault is not None:
                    return fault
        return None

    def _fault_in_steps(self, way: Way) -> str | None:
        for edges in self._edges_of_calls(way):
            fault = self._fault_of_calls(way, edges)
            if fault is not None:
                return fault
        if way in ("one token behind a cache", "a static cache"):
            return self._fault_of_many_tokens(way)
        return None

    def _fault_of_many_tokens(self, way: Way) -> str | None:
        """Try so many single tokens behind a short prompt that windows over them are full.

        All in one call tells in two forwards of almost every model that it is right; of the others, and of those that cannot
        run it, single tokens tell.
        """
        for end in self._past_windows():
            if self._fault_of_calls(way, [0, _SHORT, end]) is not None:
                fault = self._fault_of_calls(way, [0, *range(_SHORT, end + 1)])
                if fault is not None:
                    return fault
        return None

    def _fault_of_calls(self, way: Way, edges: Sequence[int]) -> str | None:
        what = f"sequences of {edges[-1]} tokens, the first {edges[1]} in one call"
        return self._fault_or_error(way, what, partial(self._compared_in_steps, way, edges))

    def _fault_or_error(self, way: Way, what: str, compared: Callable[[], str | None]) -> str | None:
        try:
            return compared()
        except _RAISED as error:
            name = type(self._decoder.model).__name__
            return f"{name} cannot be run with {way}: tried on {what}, it raised {type(error).__name__}: {error}"

    def _pairs_of_lengths(self, way: Way) -> Iterator[tuple[int, int]]:
        most = self._most()
        if way != "right padding without a mask":
            yield min(_SHORT, most), min(_LONG, most)
            return
        yield min(_RUN_SHORT, most), min(_RUN_LONG, most)
        for length in named_lengths(model_config(self._decoder.model)):
            if length in self._limits.cuts:
                pairs = [(length - 2, length), (length + 1, length + 3)]
            else:
                pairs = [(length - 1, length + 2)]
            for short, long in pairs:
                if _RUN_LONG < long <= min(_LONGEST_RUN, most) and short > 0:
                    yield short, long

    def _edges_of_calls(self, way: Way) -> Iterator[list[int]]:
        """Yield where the calls of one sequence begin, and where it ends."""
        most = self._most()
        S = min(_LONG, most)
        if way == "chunks behind a cache":
            for first, end in ((min(_SHORT, max(most // 2, 1)), S), *self._around_windows(most)):
                yield sorted({0, first, min(first + 2, end), end})
        elif way.startswith("several"):
            yield [0, S // 3, 2 * S // 3, S]
            for end in self._past_windows():
                yield [0, _SHORT, end]
        else:
            yield sorted({0, max(S - 2, 1), S - 1, S})

    def _around_windows(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield where a first chunk and the sequence end: within a window, past it, and with chunks longer than it."""
        for length in self._tried_windows():
            for first, end in ((length // 2 + 1, length + 3), (length + 2, 2 * length + 6)):
                if _LONG < end <= most:
                    yield first, end

    def _past_windows(self) -> list[int]:
        """Return where sequences end in which most tokens behind a short prompt are past a window over such tokens."""
        ends = [_SHORT + 2 * length + 6 for length in self._tried_windows()]
        return [end for end in ends if end <= self._most()]

    def _tried_windows(self) -> list[int]:
        """Return the named lengths that are tried behind a cache: those that may be a window's, and are not too long."""
        lengths = named_lengths(model_config(self._decoder.model))
        return [length for length in lengths if length <= _LONGEST_RUN and length not in self._limits.cuts]

    def _most(self, unstated: int = 4 * _LONGEST_RUN) -> int:
        """Return the most positions of a sequence that is tried; `unstated` where neither the config nor a budget names it."""
        config = model_config(self._decoder.model)
        return min(stated_positions(config) or unstated, self._limits.selects_past or unstated)

    def _compared(self, way: Way, lengths: tuple[int, int]) -> str | None:
        """Compare a batch of two sequences with each alone, and with itself where other ids stand in the padding."""
        ids = few_ids(self._decoder.model, self._decoder.vocab_rows, 2, max(lengths))
        plain, short = without_cache(self._decoder.model), min(lengths)
        forwards = [partial(self._rows, ids[row : row + 1, :n], plain, [(0, n)]) for row, n in enumerate(lengths)]
        *alone, together = self._at_once(self._collector, [*forwards, partial(self._together, way, ids, lengths)])
        half = self._half
        for name, rows, *single in zip(self._collector.taps.names, together, *alone, strict=True):
            moved = float(row_errors(rows[:short], rows[short : 2 * short]).max())
            if not moved <= (_HALF_FILLING_TOLERANCE if half else most_error(half=False)):
                return self._refusal(name, way, moved, "those beside other padding", WHY_FILLING.get(way, ""))
            # Each sequence by itself: the longer one has no padding, and would hide the other in a common median.
            parts = list(zip(rows[short:].split(list(lengths)), single, strict=True))
            change = error_beyond_rounding((parts[1], parts[0]), half=half)
            if change is not None:
                return self._refusal(name, way, change)
        return self._shifted(way, ids[1:]) if way == "left padding" else None

    def _shifted(self, way: Way, ids: Tensor) -> str | None:
        """Compare a sequence (1, S) with itself at later positions, where padding before it puts it if the model counts it.

        What changes slowly with the position, such as a scale of the attention, shows behind much padding only.
        """
        model, S = self._decoder.model, ids.shape[1]
        shift = min(self._most(_LARGEST_SHIFT), min(self._limits.cuts, default=_LARGEST_SHIFT)) - S
        if not takes_position_ids(model) or shift < 1:
            return None
        plain, positions = without_cache(model), torch.arange(S, device=ids.device)[None]
        forwards = [partial(self._rows, ids, {**plain, "position_ids": positions + k}, [(0, S)]) for k in (0, shift)]
        try:
            here, there = self._at_once(self._collector, forwards)
        except _RAISED:
            return None  # It takes other ids than these; its own, behind a little padding, were compared.
        for name, expected, rows in zip(self._collector.taps.names, here, there, strict=True):
            change = error_beyond_rounding([(rows, expected)], half=self._half)
            if change is not None:
                return self._refusal(name, way, change, why=f", {shift} positions further back")
        return None

    def _compared_in_steps(self, way: Way, edges: Sequence[int]) -> str | None:
        """Compare one forward without a cache with calls on a cache, each of which runs the tokens between two edges."""
        model, S, in_chunks = self._decoder.model, edges[-1], way == "chunks behind a cache"
        ids = few_ids(model, self._decoder.vocab_rows, 2, S)
        whole = self._rows(ids, without_cache(model), [(0, S)] * 2)
        steps, room, cache = [], S + 3, new_cache(model) if in_chunks else None
        if "static" in way:
            cache = StaticCache(config=model_config(model), max_cache_len=room)
        for a, b in pairwise(edges):
            arguments: dict[str, Any] = {"use_cache": True}
            if cache is not None:
                arguments[cache_argument(model)] = cache
            if "mask" in way:
                arguments["attention_mask"] = (torch.arange(room, device=ids.device) < b).long().repeat(2, 1)
            if "position ids" in way:
                arguments["position_ids"] = torch.arange(a, b, device=ids.device).repeat(2, 1)
            step, output = self._run(ids[:, a:b], arguments, [(0, b - a)] * 2, stop=in_chunks)
            steps.append(step)
            if not in_chunks:
                cache = cache_in(output) if isinstance(output, Mapping) else None
        for name, expected, *parts in zip(self._collector.taps.names, whole, *steps, strict=True):
            together, alone = torch.cat([_by_sequence(part) for part in parts], 1), _by_sequence(expected)
            prompt, behind = slice(0, edges[1]), slice(edges[1], None)
            change = error_beyond_rounding(
                ((together[:, at].flatten(0, 1), alone[:, at].flatten(0, 1)) for at in (prompt, behind)),
                half=self._half,
            )
            if change is not None:
                return self._refusal(name, way, change)
        return None

    def _together(self, way: Way, ids: Tensor, lengths: tuple[int, int]) -> list[Tensor]:
        """Return the real rows of three sequences: the shorter one twice, beside other padding each time, and the longer."""
        S, short = max(lengths), min(lengths)
        start = S - short if way.startswith("left") else 0
        batch, mask = torch.stack([ids[1].flip(0), ids[1], ids[1]]), torch.ones_like(ids[:1]).repeat(3, 1)
        batch[:2, start : start + short] = ids[0, :short]
        mask[:2] = 0
        mask[:2, start : start + short] = 1
        arguments = without_cache(self._decoder.model)
        if way != "right padding without a mask":
            arguments["attention_mask"] = mask
        if way == "left padding with position ids":
            arguments["position_ids"] = counted_positions(mask)
        return self._rows(batch, arguments, [(start, short)] * 2 + [(0, S)])

    def _rows(self, ids: Tensor, arguments: dict[str, Any], real: list[tuple[int, int]]) -> list[Tensor]:
        """Return (T, H) of each tap: the real rows of a forward that ends after the last tap."""
        return self._run(ids, arguments, real, stop=True)[0]

    def _run(
        self, ids: Tensor, arguments: dict[str, Any], real: list[tuple[int, int]], *, stop: bool = False
    ) -> tuple[list[Tensor], Any]:
        """Return (T, H) of each tap, the real rows of a forward, and the model's output; None where it is stopped."""
        model, slots, output = self._decoder.model, ClonedStates(len(self._collector.taps.names)), None
        with self._collector.armed(slots, *ids.shape, stop=stop):
            output = model(ids, **arguments)
        states = [state for state in slots.states if state is not None]
        rows = [
            torch.cat([state[row, start : start + length] for row, (start, length) in enumerate(real)])
            for state in states
        ]
        return rows, output

    @contextmanager
    def _attached(self) -> Iterator[None]:
        was_attached = self._collector.attached
        self._collector.attach()
        try:
            yield
        finally:
            if not was_attached:
                self._collector.detach()

    def _refusal(
        self, name: str, way: Way, change: float, beside: str = "those of the same sequence alone", why: str = ""
    ) -> str:
        return (
            f"{name} of {type(self._decoder.model).__name__} depends on how it is run: with {way} its rows differ by "
            f"{change:.2g} of their length from {beside} (tried on a few tokens){why}. {WAYS_OUT[way]}."
        )


def _by_sequence(rows: Tensor) -> Tensor:
    """Return rows (2 S, H) of two sequences as (2, S, H)."""
    return rows.view(2, -1, rows.shape[-1])
