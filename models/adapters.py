"""Adapters: readings of a residual stream that is not simply the tensor between two decoder layers.

An adapter is named by the caller, for each is a choice between states that differ: a drafter trained on one of them does not
work on another. Only where the structure leaves one reading (deepstack) is the adapter chosen without being named. The name
is what a file's header tells.

M: number of residual streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .errors import RunError

_STATE_NAMES = ("hidden_states", "x")


class StreamError(RunError):
    """A decoder layer's input or output does not hold the residual stream in the form that was expected."""


@dataclass(frozen=True)
class Site:
    """The place where a boundary is read: a module, and its input or its output.

    Attributes:
        layer: the decoder layer that must run for the site to be passed.
    """

    module: nn.Module
    path: str
    at_input: bool
    layer: int


@dataclass(frozen=True)
class Adapter:
    """The plain reading, on which the others build: item 0 of what leaves a layer, the first tensor that enters one.

    Attributes:
        layers: the decoder layers as they are called, wrappers included.
        layers_path: where their list is.
        owner: the module that holds the list.
        widths: the values that the hidden width H may have.
    """

    name: ClassVar[str]
    about: ClassVar[str]

    layers: tuple[nn.Module, ...]
    layers_path: str
    owner: nn.Module
    widths: frozenset[int]

    @classmethod
    def suits(cls, layers: Sequence[nn.Module]) -> bool:  # noqa: ARG003 - what subclasses ask of
        """Return whether the structure of `layers` allows this reading; what only a forward can show is seen when reading."""
        return True

    def site(self, boundary: int) -> Site:
        return output_site(self.layers, self.layers_path, boundary)

    def leaving(self, output: Any) -> Tensor:
        """Return the state in what a layer returned."""
        return items_of(output)[0]

    def entering(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the state among the arguments of a layer."""
        return floating(args, kwargs)[0]

    def entering_norm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input of the final norm."""
        return the_only_state(args, kwargs)

    def has_width(self, width: int) -> bool:
        """Return whether a state may be `width` wide."""
        return not self.widths or width in self.widths


class NextInput(Adapter):
    """Boundary k < n is what layer k takes in: after whatever the model does between its layers."""

    name = "next_input"
    about = "the input of the next layer, after anything that the model computes between its layers"

    def site(self, boundary: int) -> Site:
        return input_site(self.layers, self.layers_path, boundary)


class TupleFirst(Adapter):
    """Item 0 of a tuple, whatever the other items look like."""

    name = "tuple.first"
    about = "item 0 of the tuple that a layer returns"


class HiddenResidualSum(Adapter):
    """Layers that return and take ``(hidden, residual)``, as in serving engines, where the next norm does the addition."""

    name = "hidden_residual.sum"
    about = "the sum of the two tensors (hidden, residual) that a layer returns"

    def leaving(self, output: Any) -> Tensor:
        items = items_of(output)
        if len(items) < 2 or items[0].shape != items[1].shape:
            raise StreamError(f"expected a pair (hidden, residual) of one shape, found {_shapes(items)}")
        return items[0] + items[1]

    def entering(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        hidden, *rest = floating(args, kwargs)
        residual = next((t for t in rest if t.shape == hidden.shape), None)
        # The first layer gets no residual: what enters it is the stream.
        return hidden if residual is None else hidden + residual

    def entering_norm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return self.entering(args, kwargs)


class _Streams(Adapter):
    """Layers that carry M residual streams: (B, S, M, H), or (B, S, M * H) side by side."""

    axis: ClassVar[int] = 2

    def leaving(self, output: Any) -> Tensor:
        return self.reduced(self._streams(items_of(output)[0]))

    def entering(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return self.reduced(self._streams(floating(args, kwargs)[0]))

    def reduced(self, streams: Tensor) -> Tensor:
        """Return (B, S, M * H) of (B, S, M, H): all streams side by side, stream 0 first."""
        return streams.flatten(2)

    def has_width(self, width: int) -> bool:
        return any(width > H and width % H == 0 for H in self.widths)

    def _streams(self, state: Tensor) -> Tensor:
        """(B, S, M, H)"""
        H = max(self.widths, default=state.shape[-1])
        if state.ndim == 4 and state.shape[-1] == H:
            return state.movedim(self.axis, 2)
        if state.ndim == 3 and self.axis == 2 and state.shape[-1] > H and state.shape[-1] % H == 0:
            return state.reshape(*state.shape[:2], -1, H)
        raise StreamError(f"expected several residual streams of width {H}, found {_shapes([state])}")


class HyperConnectionStreams(_Streams):
    name = "hyper_connections.streams"
    about = "all residual streams side by side, M * H wide, stream 0 first"


class HyperConnectionMean(_Streams):
    name = "hyper_connections.mean"
    about = "the mean over the residual streams, which SGLang, vLLM and Automodel pass to draft models"

    def reduced(self, streams: Tensor) -> Tensor:
        return streams.mean(2)

    def has_width(self, width: int) -> bool:
        return width in self.widths


class AltUpStreams(_Streams):
    name = "altup.streams"
    about = "all AltUp streams side by side, M * H wide, stream 0 first"
    axis = 0


def output_site(layers: Sequence[nn.Module], layers_path: str, boundary: int) -> Site:
    """Boundary k > 0 where it leaves layer k-1; boundary 0 where it enters layer 0."""
    if boundary == 0:
        return Site(layers[0], f"{layers_path}.0", True, 0)
    return Site(layers[boundary - 1], f"{layers_path}.{boundary - 1}", False, boundary - 1)


def input_site(layers: Sequence[nn.Module], layers_path: str, boundary: int) -> Site:
    """Boundary k < n where it enters layer k; boundary n where it leaves layer n-1."""
    if boundary == len(layers):
        return Site(layers[-1], f"{layers_path}.{boundary - 1}", False, boundary - 1)
    return Site(layers[boundary], f"{layers_path}.{boundary}", True, boundary)


def items_of(output: Any) -> list[Tensor]:
    """Return the tensors of a module's output in order: itself, or those among the items of a tuple, list or output object.

    Raises:
        StreamError: there is none first.
    """
    if isinstance(output, Tensor):
        return [output]
    items = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(items, (tuple, list)) or not items or not isinstance(items[0], Tensor):
        raise StreamError(f"expected a tensor, or a tuple that begins with one, found {type(output).__name__}")
    return [item for item in items if isinstance(item, Tensor)]


def floating(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the floating tensors of a call: positional ones, then `hidden_states`, then the other named ones.

    Raises:
        StreamError: there is none at all.
    """
    named = sorted(kwargs.items(), key=lambda item: item[0] not in _STATE_NAMES)
    values = [*args, *(value for _, value in named)]
    found = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    if not found:
        raise StreamError("expected a floating tensor among the arguments, found none")
    return found


def the_only_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the floating tensor among the arguments of a norm.

    Raises:
        StreamError: there is none, or a second one of its shape, which the norm would add to it.
    """
    state, *rest = floating(args, kwargs)
    if any(other.shape == state.shape for other in rest):
        raise StreamError(f"expected one state, found {_shapes([state, *rest])}: this norm adds a residual first")
    return state


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
