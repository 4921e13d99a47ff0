"""What the shards of a generation say of how they were made, in the words of an offline run's."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from ...models.checkpoint import config_hash
from ...models.layer_ids import Convention, from_boundaries
from ...models.loading import LoadedModel
from ..store import FORMAT_VERSION
from .cached_model import CachedModel
from .generation_loop import LoopSettings
from .params import SamplingParams

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers")


def generation_identity(
    model: CachedModel,
    convention: Convention,
    params: Sequence[SamplingParams],
    settings: LoopSettings,
    loaded: LoadedModel | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Model, taps, sampling and how steps were made, as JSON values.

    loaded: where the model came from, if it was loaded from somewhere known.
    more: what the caller knows of tokeniser and data.
    """
    return {
        "format_version": FORMAT_VERSION,
        "model": _model(model, loaded),
        "taps": _taps(model, convention),
        "compute_dtype": _name(model.dtype),
        "store_dtype": _name(model.dtype),
        "attn_implementation": getattr(getattr(model.model, "config", None), "_attn_implementation", None),
        "mode": "generation",
        "sampling": _sampling(params),
        "steps": asdict(settings),
        **(more or {}),
    }


def shard_metadata(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What each shard says of itself: the identity, and what may differ between runs that agree."""
    return {
        **identity,
        "made_with": {
            "hiddentap": version("hiddentap"),
            **{name: version(name) for name in _LIBRARIES},
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "compiled": "off",
        },
    }


def _model(model: CachedModel, loaded: LoadedModel | None) -> dict[str, Any]:
    config = getattr(model.model, "config", None)
    return {
        "id": loaded.source.name if loaded else getattr(config, "_name_or_path", None) or None,
        "revision": loaded.revision if loaded else None,
        "class": model.name,
        "config_sha256": loaded.config_hash if loaded else config_hash(config),
        "weights_sha256": loaded.weights if loaded else None,
        "weights_dtype": loaded.weights_dtype if loaded else None,
    }


def _taps(model: CachedModel, convention: Convention) -> dict[str, Any]:
    boundaries = model.taps.boundaries
    return {
        "convention": convention,
        "layer_ids": list(from_boundaries(boundaries, convention)),
        "boundaries": list(boundaries),
        "final": model.taps.final,
        "num_hidden_layers": model.decoder.n,
        "hidden_size": model.hidden_size,
        "layers_path": model.decoder.layers_path,
        "norm_path": model.norm_path,
        "adapter": model.decoder.adapter_name,
    }


def _sampling(params: Sequence[SamplingParams]) -> dict[str, Any] | None:
    """The parameters that all requests share; None where they differ in more than their seeds."""
    shared = [_as_json(one) | {"seed": None} for one in params]
    if not shared or any(one != shared[0] for one in shared):
        return None
    seeds = {one.seed for one in params}
    return shared[0] | ({"seed": params[0].seed} if len(seeds) == 1 else {"seed": "per request"})


def _as_json(params: SamplingParams) -> dict[str, Any]:
    values = {name: getattr(params, name) for name in params.__dataclass_fields__}
    processor, bias = values["logits_processor"], values["logit_bias"]
    values["logits_processor"] = None if processor is None else type(processor).__name__
    values["logit_bias"] = None if bias is None else {str(token): str(value) for token, value in bias.items()}
    return values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
