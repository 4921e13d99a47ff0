"""Matrix products of a 16-bit model on a CPU that multiplies 16-bit floats slowly: computed in float32, rounded once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_SIXTEEN_BITS = frozenset({torch.bfloat16, torch.float16})
# What layers call for a product of two tensors. Grouped products of experts and convolutions stay as they are.
_PRODUCTS: frozenset[Any] = frozenset(
    {linear, torch.addmm, torch.baddbmm, torch.bmm, torch.einsum, torch.matmul, torch.mm}
    | {Tensor.addmm, Tensor.baddbmm, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
)
# The product that both are timed on: that of a small model's layer. Where float32 is not this much faster, nothing is changed.
_ROWS, _WIDTH, _TIMES, _WORTHWHILE = 256, 512, 5, 1.5
# Where the operands take more than this in float32 (the lm_head of a large model), that may be memory which is not there.
_LARGEST_BYTES = 1 << 30


def float32_is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this machine multiplies matrices of `dtype` faster in float32, both conversions included.

    So it is on CPUs without instructions for that dtype, 3 and 200 times on one with AVX-512 alone (bfloat16 and float16).
    It is measured, once a process, in some 50 ms.
    """
    return device.type == "cpu" and dtype in _SIXTEEN_BITS and _measured(dtype, torch.get_num_threads())


class _Float32Products(TorchFunctionMode):
    """Inside the block, `_PRODUCTS` of 16-bit tensors on the CPU are those of float32 tensors, rounded to 16 bits.

    A sum of products is rounded once either way, so this differs from the 16-bit product by the order of its sum alone. A weight
    is converted as it is used, so there is one at a time in float32 too. Holds for this thread, and in what is compiled in the
    block. Left as they are: products into a tensor (``out=``) or in place, operands of over 1 GiB in float32, tensors of other
    classes than torch's own, and what torch does inside of its own attention.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = func in _PRODUCTS and "out" not in kwargs
        dtype = _common_dtype((*args, *kwargs.values())) if ours else None
        if dtype is None:
            return func(*args, **kwargs)
        result: Tensor = func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})
        return result.to(dtype)


# One for all blocks: compiled code asks which mode it runs in.
FLOAT32_PRODUCTS = _Float32Products()


def _common_dtype(operands: tuple[Any, ...]) -> torch.dtype | None:
    """Return the 16-bit dtype that all tensors of `operands` share; None without one, or if one is no plain CPU tensor."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    plain = all(type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors)
    if not plain or len(dtypes) != 1 or not dtypes <= _SIXTEEN_BITS:
        return None
    return tensors[0].dtype if 4 * sum(tensor.numel() for tensor in tensors) <= _LARGEST_BYTES else None


def _widened(operand: Any) -> Any:
    return operand.float() if isinstance(operand, Tensor) else operand


@cache
def _measured(dtype: torch.dtype, threads: int) -> bool:  # noqa: ARG001
    rows, weight = (torch.ones(count, _WIDTH, dtype=dtype) for count in (_ROWS, _WIDTH))

    def as_it_is() -> Tensor:
        return linear(rows, weight)

    def in_float32() -> Tensor:
        with FLOAT32_PRODUCTS:
            return linear(rows, weight)

    return _quickest(as_it_is) > _WORTHWHILE * _quickest(in_float32)


def _quickest(product: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of a few calls, after one that does not count."""
    seconds = []
    with torch.inference_mode():
        for _ in range(_TIMES + 1):
            start = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
