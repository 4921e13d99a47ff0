"""Buffers that code of a checkpoint computes when it is built and that no file holds, such as rotary frequencies.

transformers builds a model on the meta device and then gives such buffers memory, which its own classes fill again; code of a
checkpoint fills it nowhere, so it would be whatever the memory held. They are built for real here, in a twin without weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UsageError


class RemoteBufferError(UsageError):
    """A model whose buffers come out otherwise each time it is built."""


def is_remote(model: nn.Module) -> bool:
    """Return whether the model's class came with a checkpoint."""
    return type(model).__module__.startswith("transformers_modules")


def build_buffers(model: Any) -> tuple[str, ...]:
    """Fill the buffers of `model` that are in no checkpoint with those of a model built anew; return their names.

    Raises:
        RemoteBufferError: two models built anew have other values there.
    """
    names = tuple(_non_persistent(model))
    if not names:
        return ()
    first, second = (_built(model, names) for _ in range(2))
    unsure = [name for name in names if not _same(first.get(name), second.get(name))]
    if unsure:
        raise RemoteBufferError(
            f"{type(model).__name__} comes with its own code, and {len(unsure)} of its buffers have other values each time "
            f"it is built ({', '.join(unsure[:3])}): they are in no weight file and its __init__ does not set them."
        )
    for name in names:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[last] = first[name].to(module._buffers[last].device)
    return names


def _built(model: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the buffers of a model of the same class and config, built without memory for its parameters."""
    config, before = copy.deepcopy(model.config), torch.get_default_dtype()
    with _parameters_on_meta(), _poisoned_memory(), torch.random.fork_rng():
        torch.seed()
        try:
            torch.set_default_dtype(model.dtype)
            twin = type(model)(config)
        finally:
            torch.set_default_dtype(before)
    buffers = dict(twin.named_buffers())
    return {name: buffers[name].clone() for name in names if name in buffers}


def _non_persistent(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            if module._buffers.get(name) is not None:
                yield f"{path}.{name}" if path else name


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal bits, and no memory that nobody wrote: NaN, and the largest integer, stand in such."""
    if one is None or other is None or one.is_meta or not torch.equal(one, other):
        return False  # NaN is equal to nothing
    integers = not one.is_floating_point() and one.dtype != torch.bool and not one.is_complex()
    return not (integers and bool((one == torch.iinfo(one.dtype).max).any()))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register inside the block lose their memory at once; buffers keep theirs."""
    theirs = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        theirs(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = theirs  # type: ignore[method-assign]


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """New memory holds NaN or the largest integer inside the block, so that what nobody wrote is seen."""
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        memory.fill_uninitialized_memory = filled
