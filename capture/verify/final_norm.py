"""The final norm of a model, found by the values that pass through it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Call(NamedTuple):
    path: str
    module: nn.Module
    entered: Tensor
    left: Tensor


def find_final_norm(model: nn.Module, forward: Callable[[], Any]) -> tuple[str, nn.Module] | None:
    """Path and module of the norm that makes the last of ``hidden_states``, or that takes it in where that one is raw.

    A norm is a module whose parameters have one dimension at most (a decoder layer has matrices) and whose output has its
    input's shape. forward: a short one; every candidate's input and output are kept. Forwards of other threads are not seen.
    """
    calls: list[_Call] = []
    mine = threading.get_ident()

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # What enters is compared after the call: a module that changes it in place is no norm we could read.
            alike = (
                args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].shape == output.shape
            )
            if alike and threading.get_ident() == mine:
                calls.append(_Call(path, module, args[0].clone(), output.clone()))

        return hook

    handles = [m.register_forward_hook(note(path)) for path, m in model.named_modules() if _like_a_norm(m)]
    try:
        states = forward().hidden_states
    finally:
        for handle in handles:
            handle.remove()
    return _final(calls, states[-1]) if states else None


def like_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that may be its final norm."""
    return [module for module in model.modules() if _like_a_norm(module)]


def _like_a_norm(module: nn.Module) -> bool:
    return all(parameter.ndim <= 1 for parameter in module.parameters())


def _final(calls: list[_Call], last: Tensor) -> tuple[str, nn.Module] | None:
    changing = [call for call in calls if not torch.equal(call.entered, call.left)]
    made = [call for call in changing if torch.equal(call.left, last)]
    taken = [call for call in changing if torch.equal(call.entered, last)]
    for call in (*made, *taken):
        return call.path, call.module
    return None
