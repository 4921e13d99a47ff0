"""Recovery from a forward that does not fit the memory of its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ....models.errors import HiddentapError, RunError
from ..batches import TokenBatch

T = TypeVar("T")

# A CPU's allocator and cuBLAS raise plain RuntimeErrors; these words are in nothing else that they say.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def unless_out_of_memory(forward: Callable[[], T]) -> T | None:
    """Return what `forward` gives, or None where the memory of the device did not hold it.

    None and not the exception, which would hold the failed forward's memory while there is room to be made.
    """
    try:
        return forward()
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except HiddentapError:
        raise
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_MEMORY):
            return None
        raise


def make_room(device: torch.device) -> None:
    """Give back what a forward that did not fit has left cached on `device`."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def too_large(sample_id: str, batch: TokenBatch, device: torch.device) -> RunError:
    """Return the error about a sample, or a chunk of one, that does not fit the memory of `device` even alone in its batch."""
    chunk, ways = batch.chunk, "lower --max-length, run long samples in chunks (--prefill-chunk)"
    what = f"sample {sample_id!r} of {batch.positions.S} tokens"
    if chunk is not None:
        what = f"the chunk of tokens {chunk.begin}..{chunk.end - 1} of sample {sample_id!r} of {chunk.length} tokens"
        ways = "lower --prefill-chunk or --max-length"
    return RunError(f"{what} does not fit the memory of {device}; {ways}, or spread the model over more memory.")
