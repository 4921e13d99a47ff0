"""The one switch of the CPU fast paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from .blocked_attention import blocked_attention, blocks_are_faster
from .float32_products import FLOAT32_PRODUCTS, float32_is_faster
from .kept_memory import KeptMemory, kept_memory


@dataclass(frozen=True)
class FastPaths:
    """The fast paths that are open inside a block.

    Attributes:
        made_with: provenance for shard headers, of the paths that round otherwise than the model: ``attention`` in blocks,
            ``products`` in float32.
        memory: the freed memory that this process keeps; None where malloc is left alone.
    """

    made_with: Mapping[str, str] = field(default_factory=dict)
    memory: KeptMemory | None = None

    def tidy(self) -> None:
        """Give free memory back to the system from time to time; call it between two forwards."""
        if self.memory is not None:
            self.memory.tidy()


AS_THE_MODEL_IS = FastPaths()


@contextmanager
def fast_paths(
    device: torch.device, dtype: torch.dtype, *, same_bits: bool = False, attention_named: bool = False
) -> Iterator[FastPaths]:
    """Open, inside the block, each fast path that is faster on this machine for a model of `dtype` on `device`.

    All of them are for the CPU; on another device nothing is changed. Kept memory and blocked attention act on the whole process,
    float32 products on the calling thread. The end of the block takes back the attention and the products, and gives free memory
    back. malloc's thresholds stay as high as glibc itself sets them in a process that has freed large blocks: there is no call
    that reads them, or lets glibc adjust them again.

    Args:
        same_bits: open only what changes no bit of a forward: kept memory.
        attention_named: leave attention as it is; the user named an implementation.

    Example:
        >>> with fast_paths(torch.device("cpu"), torch.float32) as paths:
        ...     dict(paths.made_with)
        {}
    """
    made_with: dict[str, str] = {}
    with ExitStack() as block:
        memory = block.enter_context(kept_memory(device))
        if not same_bits and not attention_named and blocks_are_faster(device, dtype):
            block.enter_context(blocked_attention())
            made_with["attention"] = "in blocks"
        if not same_bits and float32_is_faster(device, dtype):
            block.enter_context(FLOAT32_PRODUCTS)
            made_with["products"] = "in float32"
        yield FastPaths(made_with, memory)
