"""The residual stream, read from what a decoder layer takes in and gives out, by explicit rule.

A layer's output is the stream itself, or a tuple whose first item is it. A tuple that holds a second tensor as wide as the
state is never guessed at: in serving engines it is ``(hidden, residual)`` and the stream is their sum, elsewhere it is an
attention output, a state, or a part of the stream that is kept beside it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..models.adapter_names import how_to_name
from ..models.adapters import Adapter, StreamError, the_only_state
from ..models.decoder import Decoder
from .errors import TapError


def leaving(adapter: Adapter | None, output: Any, where: str) -> Tensor:
    """Return the state in what a decoder layer returned, read by `adapter`, or plainly where that is None.

    Raises:
        TapError: the output does not hold it in the expected form.
    """
    if adapter is None:
        return read_output(output, where)
    try:
        return local(adapter.leaving(output))
    except StreamError as unreadable:
        raise TapError(f"{where} returned {describe(output)}; adapter {adapter.name}: {unreadable}.") from unreadable


def entering(adapter: Adapter | None, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """Return the state among the arguments of a decoder layer, read by `adapter`, or plainly where that is None.

    Raises:
        TapError: the arguments do not hold it in the expected form.
    """
    if adapter is None:
        return read_input(args, kwargs, where)
    try:
        return local(adapter.entering(args, kwargs))
    except StreamError as unreadable:
        raise TapError(
            f"{where} was called with {describe(args)}; adapter {adapter.name}: {unreadable}."
        ) from unreadable


def read_output(output: Any, where: str) -> Tensor:
    """Return the residual stream in a decoder layer's output.

    Raises:
        TapError: no tensor first, or another tensor in the tuple is as wide as it.
    """
    if isinstance(output, Tensor):
        return local(output)
    items = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(items, (tuple, list)) or not items or not isinstance(items[0], Tensor):
        raise TapError(f"{where} returned {describe(output)}; expected a tensor, or a tuple that begins with one.")
    first = items[0]
    twins = [i for i, item in enumerate(items[1:], 1) if isinstance(item, Tensor) and _look_alike(first, item)]
    if twins:
        raise TapError(_not_told(describe(output), twins[0], items[twins[0]].shape == first.shape, where))
    return local(first)


def read_input(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """Return the residual stream among a layer's or norm's arguments: the first positional tensor, or `hidden_states`.

    Raises:
        TapError: there is no such tensor, or what the first argument holds is none.
    """
    value = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
    if not isinstance(value, Tensor):
        raise TapError(f"{where} was called with {describe(value)}; expected a tensor as its first argument.")
    return local(value)


def entering_norm(adapter: Adapter | None, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """Return the state among the arguments of the final norm.

    Raises:
        TapError: there is none, or two, which the norm adds and only an adapter for pairs reads.
    """
    try:
        return local(the_only_state(args, kwargs) if adapter is None else adapter.entering_norm(args, kwargs))
    except StreamError as unreadable:
        raise TapError(f"{where} was called with {describe(args)}: {unreadable}.") from unreadable


def leaving_norm(output: Any) -> Tensor:
    """Return the final norm's output, or its first item: a norm that also adds returns the sum beside it."""
    return local(output[0] if isinstance(output, tuple) else output)


def form_fault(decoder: Decoder, state: Tensor, where: str) -> str | None:
    """Return why `state` is not one residual stream of the hidden width; None if it may be."""
    if decoder.adapter is not None or not decoder.widths:
        return None
    H = max(decoder.widths)
    if state.ndim == 4 and state.shape[-1] in decoder.widths:
        return (
            f"{where} handles {describe(state)}: several residual streams of width {state.shape[-1]}. "
            f"{how_to_name('hyper_connections.mean', 'hyper_connections.streams', 'altup.streams')}"
        )
    if state.ndim == 3 and state.shape[-1] > H and state.shape[-1] % H == 0:
        return (
            f"{where} handles {describe(state)}: {state.shape[-1] // H} times as wide as the embeddings, so several residual "
            f"streams side by side. {how_to_name('hyper_connections.mean', 'hyper_connections.streams')}"
        )
    return None


def blocks_beside(
    decoder: Decoder, state: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
) -> str | None:
    """Return why a layer's input is only part of the stream (completed blocks (B, S, K, H) beside it); None if it is not."""
    if decoder.adapter is not None:
        return None
    B, S, H = state.shape if state.ndim == 3 else (0, 0, 0)
    blocks = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim == 4 and v.is_floating_point())
    beside = next((v for v in blocks if v.shape[:2] == (B, S) and v.shape[-1] == H), None)
    if beside is None:
        return None
    return (
        f"{where} takes in {describe(beside)} beside its state {tuple(state.shape)}: completed blocks of the residual stream, "
        f"of which the state is only the running part. {how_to_name('attention_residuals.prefix')}"
    )


def local(state: Tensor) -> Tensor:
    """Return the plain tensor behind one that is still being gathered, or is spread over a tensor-parallel group.

    The second is a collective: every rank of the group reaches it, since all tap the same layers.
    """
    if isinstance(state, AsyncCollectiveTensor):
        return state.wait()
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state


def describe(value: Any) -> str:
    """Return a short account of a value for messages: types and shapes, never contents."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(describe(v) for v in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _look_alike(first: Tensor, other: Tensor) -> bool:
    """Return whether a second tensor could be a part of the stream: one for each position and as wide. Attention maps are 4-D."""
    return other.is_floating_point() and other.ndim in (2, 3) and other.shape[-1] == first.shape[-1]


def _not_told(output: str, item: int, same_shape: bool, where: str) -> str:
    if same_shape:
        return (
            f"{where} returned {output}: item {item} looks just like the hidden state at item 0, so which of them, or their "
            f"sum, is the residual stream cannot be told from the structure. {how_to_name('hidden_residual.sum', 'tuple.first')}"
        )
    names = ("attention_residuals.prefix", "attention_residuals.mixture", "tuple.first")
    return (
        f"{where} returned {output}: item {item} is as wide as the hidden state at item 0, so it may hold a part of the "
        f"residual stream. {how_to_name(*names)}"
    )
