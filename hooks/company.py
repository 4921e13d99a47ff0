"""Whether a row is the same in company: in a batch, beside padding, as it is when its sequence runs alone.

A model is compared with itself, once for each way of running and only when that way is first used: two sequences of different
lengths in one batch, padded as the caller pads, beside each alone. What is not equal within rounding is refused for that way
of running; the others stay open. Lengths at which rotary embeddings change are known without a run: see
`models.length_limits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
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
from .errors import TapError
from .positions import RealPositions, has_state
from .rounding import computes_in_half, error_beyond_rounding, most_error, row_errors
from .slots import ClonedStates

Way = Literal[
    "right padding without a mask",
    "right padding with a mask",
    "left padding",
    "left padding with position ids",
    "a static cache",
    "a static cache and a wider mask",
    "a static cache, a wider mask and position ids",
    "one token behind a cache",
    "several tokens behind a cache",
    "several tokens behind a static cache",
    "chunks behind a cache",
]

# Runs forwards of one collector, each to the rows that it gives, and returns these in order.
AtOnce = Callable[[Collector, Sequence[Callable[[], list[Tensor]]]], list[list[Tensor]]]

_SHORT, _LONG = 4, 9
# Of the way that each run proves when it begins: as few tokens as show it.
_RUN_SHORT, _RUN_LONG = 3, 4
# Named lengths up to this one are run too; longer ones would cost more than a run gains.
_LONGEST_RUN = 128
# Nothing but what stands in the padding differs: rows of half precision hardly move at all then.
_HALF_FILLING_TOLERANCE = 1e-2

_WAYS_OUT: dict[Way, str] = {
    "right padding without a mask": "Run one sequence a forward (--exact), or give an attention_mask",
    "right padding with a mask": "Run one sequence a forward, or sequences of one length",
    "left padding": "Pad on the right, give position_ids that leave padding out, or run one sequence a forward",
    "left padding with position ids": "Pad on the right, or run one sequence a forward",
    "a static cache": "Use the model's own dynamic cache",
    "a static cache and a wider mask": "Give a mask of the positions that are held and those of the call",
    "a static cache, a wider mask and position ids": "Give a mask of the positions that are held and those of the call",
    "one token behind a cache": "Run the whole sequence without a cache",
    "several tokens behind a cache": "Run one token at a time behind the cache, or the whole sequence without it",
    "several tokens behind a static cache": "Run one token at a time behind the cache, or the whole sequence without it",
    "chunks behind a cache": "Run the whole sequence in one forward, without prefill_chunk (--prefill-chunk)",
}
_WHY_FILLING: dict[Way, str] = {
    "right padding without a mask": ": the model is not causal as it is configured",
    "left padding": ": the model does not leave out what its mask leaves out",
    "left padding with position ids": ": the model does not leave out what its mask leaves out",
}


def one_after_the_other(_collector: Collector, forwards: Sequence[Callable[[], list[Tensor]]]) -> list[list[Tensor]]:
    """Run `forwards` of a model that is whole in memory."""
    return [forward() for forward in forwards]


class Company:
    """Findings on one model's rows in company; each way of running is tried once."""

    def __init__(
        self,
        decoder: Decoder,
        collector: Collector,
        limits: LengthLimits,
        quietly: Callable[[], AbstractContextManager[None]] = nullcontext,
        at_once: AtOnce = one_after_the_other,
    ) -> None:
        """Begin with nothing tried.

        Args:
            collector: the taps whose rows are compared; it may be on the model already.
            quietly: a block in which calls of the model are nobody's but the probe's.
            at_once: runs the forwards that are compared; of a model whose layers are read while it runs, all of them in one
                reading.
        """
        self._decoder, self._collector, self._limits, self._quietly = decoder, collector, limits, quietly
        self._at_once = at_once
        self._faults: dict[Way, str | None] = {}
        self._half = computes_in_half(decoder.model)

    def require(self, way: Way) -> None:
        """Raise TapError unless rows that run this way are those of their sequences alone."""
        if way not in self._faults:
            self._faults[way] = self._tried(way)
        fault = self._faults[way]
        if fault is not None:
            raise TapError(fault)

    def require_batches(self) -> None:
        """Raise TapError unless sequences may share a forward, padded on the right without a mask.

        Which lengths may (`LengthLimits.cuts`, `LengthLimits.selects_past`) is the caller's to keep.
        """
        self.require("right padding without a mask")

    def require_chunks(self) -> None:
        """Raise TapError unless a sequence may run chunk by chunk behind its cache, each forward ended after the last tap.

        Which lengths may (`LengthLimits`) is the caller's to keep.
        """
        self.require("chunks behind a cache")

    def arguments_for(
        self,
        positions: RealPositions,
        given: Mapping[str, Any],
        mask: Any = None,
        held: int = 0,
        before: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Prove the way in which one call runs, and return the arguments that it needs besides: position ids, or none.

        Args:
            positions: the real positions of the call.
            given: the arguments of the call.
            mask: (B, W) where one tells the padding.
            held: positions that a cache holds.
            before: real ones of them in each row; None: all.

        Raises:
            TapError: rows of this call would not be those of their sequences alone.
        """
        before = before if before is not None else (held,) * positions.B
        left = any(positions.starts) or min(before) < held
        own_ids = given.get("position_ids")
        counted = left and own_ids is None and self.counts_positions()
        self._require_limits(positions, own_ids, before, held, counted=counted)
        self._require_cache(cache_in(given), positions, mask, held, own_ids is not None)
        if left and own_ids is not None:
            self.require("left padding with position ids")
        elif not left and not positions.all_real:
            masked = isinstance(mask, Tensor)
            self.require("right padding with a mask" if masked else "right padding without a mask")
        if not counted:
            return {}
        if not isinstance(mask, Tensor) or mask.shape[1] < held + positions.S:
            raise TapError(
                f"{type(self._decoder.model).__name__} needs position ids for sequences that are padded on the left, and the "
                "mask of this call does not tell them; give position_ids."
            )
        return {"position_ids": counted_positions(mask)[:, held : held + positions.S]}

    def _require_cache(self, cache: Any, positions: RealPositions, mask: Any, held: int, own_ids: bool) -> None:
        is_static, behind = type(cache) is StaticCache, held > 0 or has_state(cache)
        if is_static:
            self.require("a static cache")
        elif behind and positions.S == 1:
            self.require("one token behind a cache")
        if behind and positions.S > 1:
            self.require("several tokens behind a static cache" if is_static else "several tokens behind a cache")
        if is_static and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > held + positions.S:
            self.require(
                "a static cache, a wider mask and position ids" if own_ids else "a static cache and a wider mask"
            )

    def _require_limits(
        self, positions: RealPositions, own_ids: Any, before: Sequence[int], held: int, *, counted: bool
    ) -> None:
        limits = self._limits
        if limits == LengthLimits():
            return
        totals = [b + length for b, length in zip(before, positions.lengths, strict=True)]
        width = held + positions.S
        if isinstance(own_ids, Tensor):
            width = int(own_ids.max()) + 1
        elif counted:
            width = max(totals)
        fault = limits.fault(totals, width, max(before)) or limits.selection_fault(totals, held + positions.S, held)
        if fault is not None:
            raise TapError(f"{type(self._decoder.model).__name__}: {fault}")

    def try_every_way(self) -> None:
        """Try all ways now: a sharded model runs in all its processes or in none, and only some of them may meet padding."""
        for way in get_args(Way):
            if way not in self._faults:
                self._faults[way] = self._tried(way)

    def counts_positions(self) -> bool:
        """Return whether sequences padded on the left need position ids that were counted from their mask.

        Raises:
            TapError: neither with nor without such ids are their rows those of the sequences alone.
        """
        try:
            self.require("left padding")
        except TapError as without:
            if not self._takes_position_ids():
                raise
            try:
                self.require("left padding with position ids")
            except TapError:
                raise without from None
            return True
        return False

    def _takes_position_ids(self) -> bool:
        return "position_ids" in inspect.signature(type(unwrapped(self._decoder.model)).forward).parameters

    @torch.no_grad()
    def _tried(self, way: Way) -> str | None:
        model = self._decoder.model
        with self._quietly(), self._attached(), evaluating(model), randomness_kept(model), eagerly(model):
            for lengths in self._pairs_of_lengths(way):
                try:
                    fault = self._compared(way, lengths)
                except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
                    fault = (
                        f"{type(model).__name__} cannot be run with {way}: tried on sequences of {lengths[0]} and {lengths[1]} "
                        f"tokens, it raised {type(error).__name__}: {error}"
                    )
                if fault is not None:
                    return fault
        return None

    def _pairs_of_lengths(self, way: Way) -> Iterator[tuple[int, int]]:
        config = model_config(self._decoder.model)
        most = min(stated_positions(config) or _LONGEST_RUN, self._limits.selects_past or _LONGEST_RUN)
        if way == "chunks behind a cache":
            yield from self._around_windows(config, most)
            return
        if way != "right padding without a mask":
            yield min(_SHORT, most), min(_LONG, most)
            return
        yield min(_RUN_SHORT, most), min(_RUN_LONG, most)
        for length in named_lengths(config):
            if length in self._limits.cuts:
                pairs = [(length - 2, length), (length + 1, length + 3)]
            else:
                pairs = [(length - 1, length + 2)]
            for short, long in pairs:
                if _RUN_LONG < long <= min(_LONGEST_RUN, most) and short > 0:
                    yield short, long

    def _around_windows(self, config: Any, most: int) -> Iterator[tuple[int, int]]:
        """Yield where a first chunk and the sequence end: within a window, past it, and with chunks longer than it."""
        yield min(_SHORT, max(most // 2, 1)), min(_LONG, most)
        for length in named_lengths(config):
            if length > _LONGEST_RUN or length in self._limits.cuts:
                continue
            for first, end in ((length // 2 + 1, length + 3), (length + 2, 2 * length + 6)):
                if _LONG < end <= most:
                    yield first, end

    def _compared(self, way: Way, lengths: tuple[int, int]) -> str | None:
        """Compare a batch of two sequences with each alone, and with itself where other ids stand in the padding."""
        ids = few_ids(self._decoder.model, self._decoder.vocab_rows, 2, max(lengths))
        if "cache" in way:
            return self._compared_in_steps(way, ids, min(lengths))
        plain, short = without_cache(self._decoder.model), min(lengths)
        forwards = [partial(self._rows, ids[row : row + 1, :n], plain, [(0, n)]) for row, n in enumerate(lengths)]
        *alone, together = self._at_once(self._collector, [*forwards, partial(self._together, way, ids, lengths)])
        half = self._half
        for name, rows, *single in zip(self._collector.taps.names, together, *alone, strict=True):
            moved = float(row_errors(rows[:short], rows[short : 2 * short]).max())
            if not moved <= (_HALF_FILLING_TOLERANCE if half else most_error(half=False)):
                return self._refusal(name, way, moved, "those beside other padding", _WHY_FILLING.get(way, ""))
            # Each sequence by itself: the longer one has no padding, and would hide the other in a common median.
            parts = list(zip(rows[short:].split(list(lengths)), single, strict=True))
            change = error_beyond_rounding((parts[1], parts[0]), half=half)
            if change is not None:
                return self._refusal(name, way, change)
        return None

    def _compared_in_steps(self, way: Way, ids: Tensor, short: int) -> str | None:
        """Compare a prompt and what follows it, on a cache, with one forward without a cache.

        short: where the first chunk ends, of chunks behind a cache.
        """
        model, S, in_chunks = self._decoder.model, ids.shape[1], way == "chunks behind a cache"
        whole = self._rows(ids, without_cache(model), [(0, S)] * 2)
        edges = [0, S // 3, 2 * S // 3, S] if way.startswith("several") else sorted({0, max(S - 2, 1), S - 1, S})
        if in_chunks:
            edges = sorted({0, short, min(short + 2, S), S})
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
            f"{change:.2g} of their length from {beside} (tried on a few tokens){why}. {_WAYS_OUT[way]}."
        )


def counted_positions(mask: Tensor) -> Tensor:
    """Return (B, W) int64: the positions of the real columns of a mask (B, W), counted from 0; 0 in padding before them."""
    return (mask.to(torch.int64).cumsum(1) - 1).clamp(min=0)


def _by_sequence(rows: Tensor) -> Tensor:
    """Return rows (2 S, H) of two sequences as (2, S, H)."""
    return rows.view(2, -1, rows.shape[-1])
