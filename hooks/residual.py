"""The residual stream, read from what a decoder layer takes in and gives out, by explicit rule.

A layer's output is the stream itself, or a tuple whose first item is it. A tuple that holds a second tensor of the same
shape is never guessed at: in serving engines it is ``(hidden, residual)`` and the stream is their sum, elsewhere it is an
attention output or a state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from .errors import TapError


def read_output(output: Any, where: str) -> Tensor:
    """The residual stream in a decoder layer's output.

    Raises:
        TapError: no tensor first, or another tensor in the tuple looks just like it.
    """
    if isinstance(output, Tensor):
        return local(output)
    items = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(items, (tuple, list)) or not items or not isinstance(items[0], Tensor):
        raise TapError(f"{where} returned {describe(output)}; expected a tensor, or a tuple that begins with one.")
    first = items[0]
    twins = [i for i, item in enumerate(items[1:], 1) if isinstance(item, Tensor) and _look_alike(first, item)]
    if twins:
        raise TapError(
            f"{where} returned {describe(output)}: item {twins[0]} looks just like the hidden state at item 0, so which of "
            "them, or their sum, is the residual stream cannot be told from the structure. This model needs an adapter."
        )
    return local(first)


def read_input(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """The residual stream among the arguments of a decoder layer or a norm: the first positional tensor, or `hidden_states`.

    Raises:
        TapError: there is no such tensor.
    """
    value = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
    if not isinstance(value, Tensor):
        raise TapError(f"{where} was called with {describe(value)}; expected a tensor as its first argument.")
    return local(value)


def local(state: Tensor) -> Tensor:
    """The plain tensor behind one that is still being gathered, or is spread over a tensor-parallel group.

    The second is a collective: every rank of the group reaches it, since all tap the same layers.
    """
    if isinstance(state, AsyncCollectiveTensor):
        return state.wait()
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state


def describe(value: Any) -> str:
    """A short account of a value for messages: types and shapes, never contents."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(describe(v) for v in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _look_alike(first: Tensor, other: Tensor) -> bool:
    return other.is_floating_point() and other.shape == first.shape and first.dtype != torch.bool
