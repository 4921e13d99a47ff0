"""Which dtypes matrix products get in the end."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAMES = ("linear", "mm", "bmm", "matmul", "__matmul__", "addmm", "baddbmm", "einsum")


class SeenProducts(TorchFunctionMode):
    """Notes the dtypes of products inside the block, after whatever modes opened in it have changed them."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        self.names = names
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = (*args, *(kwargs or {}).values())
        if func.__name__ in self.names:
            self.dtypes |= {operand.dtype for operand in operands if isinstance(operand, Tensor)}
        return func(*args, **(kwargs or {}))
