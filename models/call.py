"""Calls of a causal language model: its cache argument, the device of its token ids, a few ids to try it with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .config import model_config, role_ids
from .modules import is_compiled, unwrapped
from .versions import CACHE_NAMES


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the KV cache among the arguments of a call, or None."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def cache_argument(model: nn.Module) -> str:
    """Return the name under which `model` takes a KV cache."""
    parameters = inspect.signature(type(unwrapped(model)).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the argument that tells `model` to build no KV cache, where it has such an argument."""
    parameters = inspect.signature(type(unwrapped(model)).forward).parameters
    named = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if named else {}


def new_cache(model: nn.Module) -> DynamicCache:
    """Return an empty cache with the layers that the config of `model` names."""
    return DynamicCache(config=model_config(model))


def input_device(model: nn.Module) -> torch.device:
    """Return the device of token ids: that of the input embedding, or the CPU if parameters are offloaded (meta)."""
    weight = _input_weight(model)
    return torch.device("cpu") if weight is None or weight.device.type == "meta" else weight.device


def is_skeleton(model: nn.Module) -> bool:
    """Return whether the model has shapes alone: its parameters are on the meta device and nothing brings them in for a call."""
    weight = _input_weight(model)
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return weight is not None and weight.device.type == "meta" and not offloaded


def few_ids(model: nn.Module, vocab_rows: int | None, B: int, S: int) -> Tensor:
    """(B, S) int64 ids that differ where they can, spread over the vocabulary, none of which the config gives a role to."""
    special = role_ids(model_config(model))
    rows, count = vocab_rows or 2 * B * S, B * S
    plain = [i for i in range(0, rows, max(rows // (4 * count), 1)) if i not in special] or list(range(rows))
    device = torch.device("meta") if is_skeleton(model) else input_device(model)
    return torch.tensor([plain[i % len(plain)] for i in range(count)]).reshape(B, S).to(device)


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run what is inside without compiled code where parts of `model` are compiled.

    Hooks that stay for one forward would else be traced into a graph, or be missed by one that exists.
    """
    if not is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep evaluation mode inside the block; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def randomness_kept(model: nn.Module) -> Iterator[None]:
    """Draw what random numbers one likes inside the block; afterwards the generators that the model uses are as they were."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng(sorted(d.index or 0 for d in devices), device_type=kind):
        yield


def input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that token ids enter, or None where the model shows none."""
    get_input_embeddings = getattr(model, "get_input_embeddings", None)
    if not callable(get_input_embeddings):
        return None
    try:
        embedding: nn.Module | None = get_input_embeddings()
    except NotImplementedError:  # transformers' way to say that a model has no single embedding module
        return None
    return embedding


def _input_weight(model: nn.Module) -> Tensor | None:
    weight = getattr(input_embedding(model), "weight", None)
    return weight if isinstance(weight, Tensor) else next(model.parameters(), None)
