"""How a causal language model is called: its cache argument, where its token ids go, a few ids to try it with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .compilation import is_compiled
from .config import role_ids
from .wrappers import unwrapped

# transformers 5 calls it `cache` and renames the next two on the way in; rwkv has a list called `state`.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The KV cache among the arguments of a call, or None."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that tells `model` to build no KV cache, where it has such an argument."""
    parameters = inspect.signature(type(unwrapped(model)).forward).parameters
    named = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if named else {}


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go: the device of the input embedding, or the CPU where parameters are offloaded (meta)."""
    weight = _input_weight(model)
    return torch.device("cpu") if weight is None or weight.device.type == "meta" else weight.device


def is_skeleton(model: nn.Module) -> bool:
    """Whether the model has shapes alone: its parameters are on the meta device and nothing brings them in for a call."""
    weight = _input_weight(model)
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return weight is not None and weight.device.type == "meta" and not offloaded


def few_ids(model: nn.Module, vocab_rows: int | None, B: int, S: int) -> Tensor:
    """(B, S) int64 ids that differ where they can, spread over the vocabulary, none of which the config gives a role to."""
    special = role_ids(getattr(model, "config", None))
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


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The module that token ids enter, or None where the model shows none."""
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
