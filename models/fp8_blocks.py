"""The block size of FP8 weights, taken from the config while a checkpoint is dequantized.

For transformers 5.24 (`Fp8Dequantize._dequantize_one`), which takes rows // scale rows for the height of a block: right where the
blocks fill the matrix, an error or wrong values where the last ones are cut (576 rows in blocks of 128: DeepSeek-V3, Kimi K2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


@contextmanager
def blocks_of_the_config(block: tuple[int, int] | None) -> Iterator[None]:
    """Inside the block, FP8 weights are dequantized by `block` (rows, columns); None leaves transformers' rule.

    A grid of scales that does not belong to that block size (experts with blocks of their own) keeps transformers' rule.
    """
    if block is None:
        yield
        return
    theirs: Callable[..., Tensor] = Fp8Dequantize._dequantize_one

    def by_block(self: Any, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        if not _cuts_blocks(quantized, scales, block):
            return theirs(self, quantized, scales, output_dtype)
        rows, cols = quantized.shape[-2:]
        missing = -rows % block[0], -cols % block[1]
        # Whole blocks again, so that transformers' rule finds their size; what was added is cut off.
        filled = functional.pad(quantized.view(torch.uint8), (0, missing[1], 0, missing[0])).view(quantized.dtype)
        return theirs(self, filled, scales, output_dtype)[..., :rows, :cols].contiguous()

    Fp8Dequantize._dequantize_one = by_block
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = theirs


def _cuts_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> bool:
    """Return whether the scales are one a block of that size and the last blocks are smaller ones."""
    if weight.element_size() != 1 or not weight.is_floating_point() or scales.ndim < 2:
        return False
    sizes = list(zip(weight.shape[-2:], block, strict=True))
    grid = tuple(-(-size // step) for size, step in sizes)
    return tuple(scales.shape[-2:]) == grid and any(size % step for size, step in sizes)
