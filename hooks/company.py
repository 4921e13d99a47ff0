"""Whether a row is the same in company: in a batch, beside padding, as it is when its sequence runs alone.

A model is compared with itself, once for each way of running and only when that way is first used (`company_probe`). What is
not equal within rounding is refused for that way of running; the others stay open. Lengths at which rotary embeddings change
are known without a run: see `models.length_limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

from torch import Tensor
from transformers import StaticCache

from ..models.call import cache_in
from ..models.decoder import Decoder
from ..models.length_limits import LengthLimits
from .collector import Collector
from .company_probe import AtOnce, CompanyProbe, one_after_the_other, takes_position_ids
from .errors import TapError
from .positions import RealPositions, counted_positions, has_state
from .ways import Way


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
        self._decoder, self._limits = decoder, limits
        self._probe = CompanyProbe(decoder, collector, limits, quietly, at_once)
        self._faults: dict[Way, str | None] = {}

    def require(self, way: Way) -> None:
        """Raise TapError unless rows that run this way are those of their sequences alone."""
        fault = self._fault(way)
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
        self._require_limits(positions, own_ids, before, held, left=left, counted=counted)
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
        self, positions: RealPositions, own_ids: Any, before: Sequence[int], held: int, *, left: bool, counted: bool
    ) -> None:
        limits = self._limits
        if limits == LengthLimits():
            return
        totals = [b + length for b, length in zip(before, positions.lengths, strict=True)]
        width = columns = held + positions.S
        if isinstance(own_ids, Tensor):
            width = int(own_ids.max()) + 1
        elif counted:
            width = max(totals)
        fault = limits.fault(totals, width, max(before)) or limits.selection_fault(totals, columns, held)
        if left:
            fault = fault or limits.scale_fault(columns)
        if fault is not None:
            raise TapError(f"{type(self._decoder.model).__name__}: {fault}")

    def try_every_way(self) -> None:
        """Try all ways now: a sharded model runs in all its processes or in none, and only some of them may meet padding."""
        for way in get_args(Way):
            self._fault(way)

    def counts_positions(self) -> bool:
        """Return whether sequences padded on the left need position ids that were counted from their mask.

        Raises:
            TapError: neither with nor without such ids are their rows those of the sequences alone.
        """
        try:
            self.require("left padding")
        except TapError as without:
            if not takes_position_ids(self._decoder.model):
                raise
            try:
                self.require("left padding with position ids")
            except TapError:
                raise without from None
            return True
        return False

    def _fault(self, way: Way) -> str | None:
        if way not in self._faults:
            self._faults[way] = self._probe.fault(way)
        return self._faults[way]
