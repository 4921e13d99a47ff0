"""The key-value cache of the one sample that runs in chunks."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DynamicCache

from .....models.call import cache_argument, new_cache
from .....models.errors import RunError, UsageError
from .....models.length_limits import LengthLimits
from ...batches import Chunk


class SampleCache:
    """Holds the positions of a sample between its chunks; empty before the first chunk and after the last one.

    Layers behind the last tap never run, so they hold nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._argument = model, cache_argument(model)
        self._cache: DynamicCache | None = None
        self._held = 0

    def arguments(self, chunk: Chunk) -> dict[str, Any]:
        """Return the arguments of the forward of `chunk`, which puts its positions into the cache.

        Raises:
            RunError: the chunk does not follow the one before it.
        """
        if chunk.begin == 0:
            self._cache, self._held = new_cache(self._model), 0
        if self._cache is None or chunk.begin != self._held:
            raise RunError(f"the cache holds {self._held} positions, and the chunk begins at position {chunk.begin}.")
        return {self._argument: self._cache, "use_cache": True}

    def ran(self, chunk: Chunk) -> None:
        """Count the positions of `chunk` as held; after the last chunk of a sample, drop them all."""
        self._held = chunk.end
        if chunk.is_last:
            self._cache, self._held = None, 0


def require_chunks_within(limits: LengthLimits, chunk: int, longest: int) -> None:
    """Raise UsageError where the model computes a sample of `longest` tokens otherwise in chunks than whole.

    Shorter samples are computed alike where the longest one is: chunks end at the same positions.
    """
    if longest <= chunk:
        return
    for begin in range(0, longest, chunk):
        end = min(begin + chunk, longest)
        fault = limits.fault((end,), end, begin) or limits.selection_fault((end,), end, begin)
        if fault is not None:
            larger = [cut + 1 for cut in limits.cuts if begin <= cut < end]
            way_out = f"Take chunks of at least {max(larger)} tokens, or l" if larger else "L"
            raise UsageError(
                f"samples of up to {longest} tokens cannot run in chunks of {chunk}: {fault} {way_out}eave prefill_chunk "
                "(--prefill-chunk) out."
            )
