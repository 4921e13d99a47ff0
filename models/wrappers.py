"""Modules around a module: what compilation and activation checkpointing put there."""

from __future__ import annotations

from torch import nn


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of ``torch.compile`` and of activation checkpointing."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = module._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    return module
