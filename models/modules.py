"""Modules as they really are: what compilation, checkpointing and sharding put around them, and whether values are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

F = TypeVar("F", bound=Callable[..., object])

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of ``torch.compile`` and of activation checkpointing."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = module._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    return module


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it was given to ``torch.compile``."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def untraced(reason: str) -> Callable[[F], F]:
    """Decorate a function: it and all that it calls run outside any graph; one break, where it is called."""
    disable: Callable[..., Callable[[F], F]] = torch.compiler.disable
    return disable(reason=reason)


def untraced_itself(function: F) -> F:
    """Decorate a function: it runs outside any graph, but what it calls may be compiled."""
    disable: Callable[..., F] = torch.compiler.disable
    return disable(function, recursive=False)


def is_sharded(model: nn.Module) -> bool:
    """Return whether this process holds a part of the weights, so that a forward is one of several processes together."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


def whole(tensor: Tensor) -> Tensor:
    """Return all of `tensor`. Every process that holds a part of it must ask at once."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def address(tensor: Tensor) -> int:
    """Return where the memory of this process's part begins; two weights that are tied have one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two floating tensors are equal bit for bit: NaN equals NaN, and 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = _AS_INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.detach().to(a.device).contiguous().view(integers))
