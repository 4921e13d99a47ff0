"""How a causal language model is called: its cache argument, where its token ids go."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .decoder import unwrapped

# transformers 5 calls it `cache` and renames the other two on the way in.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


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
    embedding = getattr(model, "get_input_embeddings", None)
    weight = getattr(embedding() if callable(embedding) else None, "weight", None)
    if weight is None:
        weight = next(model.parameters(), None)
    return torch.device("cpu") if weight is None or weight.device.type == "meta" else weight.device
