"""What has to be said to ``torch.compile`` about hooks that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., object])


def untraced(reason: str) -> Callable[[F], F]:
    """A decorator: the function and all that it calls run outside any graph; one break, where it is called."""
    disable: Callable[..., Callable[[F], F]] = torch.compiler.disable
    return disable(reason=reason)


def untraced_itself(function: F) -> F:
    """A decorator: the function runs outside any graph, but what it calls may be compiled."""
    disable: Callable[..., F] = torch.compiler.disable
    return disable(function, recursive=False)


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was given to ``torch.compile``."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())
