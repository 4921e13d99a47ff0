"""The adapters by their names, which a caller gives and a file's header tells."""

from __future__ import annotations

import inspect

from torch import nn

from .adapters import (
    Adapter,
    AltUpStreams,
    HiddenResidualSum,
    HyperConnectionMean,
    HyperConnectionStreams,
    NextInput,
    TupleFirst,
)
from .errors import UsageError
from .kimi import AttentionResidualMixture, AttentionResidualPrefix
from .modules import unwrapped


class AdapterError(UsageError):
    """An adapter that does not exist, or that the model's structure does not fit."""


ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter
    for adapter in (
        HyperConnectionMean,
        HyperConnectionStreams,
        AltUpStreams,
        AttentionResidualPrefix,
        AttentionResidualMixture,
        HiddenResidualSum,
        TupleFirst,
        NextInput,
    )
}


def adapter_named(
    name: str, layers: tuple[nn.Module, ...], layers_path: str, owner: nn.Module, widths: frozenset[int]
) -> Adapter:
    """Return the adapter called `name` for these layers.

    Raises:
        AdapterError: no adapter has that name, or the layers have not the structure that it reads.
    """
    adapter = ADAPTERS.get(name)
    if adapter is None:
        raise AdapterError(f"unknown adapter {name!r}; expected one of {', '.join(ADAPTERS)}.")
    if not adapter.suits(layers):
        raise AdapterError(
            f"adapter {name} reads {adapter.about}; the layers at {layers_path} ({type(unwrapped(layers[0])).__name__}) "
            "have nothing of that kind."
        )
    return adapter(layers, layers_path, owner, widths)


def adapter_of_structure(
    layers: tuple[nn.Module, ...], layers_path: str, owner: nn.Module, widths: frozenset[int]
) -> Adapter | None:
    """Return the one adapter that the structure leaves no choice about, or None.

    A decoder that takes ``deepstack`` features adds visual features between its layers; serving engines tap what enters the
    next layer, after that addition.
    """
    parameters = inspect.signature(type(owner).forward).parameters
    if any(name.startswith("deepstack") for name in parameters):
        return NextInput(layers, layers_path, owner, widths)
    return None


def how_to_name(*names: str) -> str:
    """Return the end of a message that tells which adapters to choose from."""
    choices = "; ".join(f"{name} ({ADAPTERS[name].about})" for name in names)
    return (
        f'This model needs an adapter: name one by tap(..., adapter="{names[0]}") or --adapter {names[0]}. '
        f"Those that may fit: {choices}."
    )
