"""What a run's files say of how they were made."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from ...models.loading import LoadedModel
from ..data import TokenisationIdentity, source_identity
from ..store import FORMAT_VERSION
from .hugging_face import AttachedModel
from .settings import CaptureSettings
from .vllm import engine_identity

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers")


def run_identity(
    settings: CaptureSettings, loaded: LoadedModel, attached: AttachedModel, tokenisation: TokenisationIdentity
) -> dict[str, Any]:
    """What a later run on the same folder must agree with, as JSON values."""
    return {
        "format_version": FORMAT_VERSION,
        "model": _model(loaded, attached),
        "taps": _taps(settings, attached),
        "compute_dtype": _name(attached.dtype),
        "store_dtype": settings.store_dtype or _name(attached.dtype),
        "attn_implementation": _attention(settings, attached),
        "top_logits": settings.top_logits,
        "mode": _mode(settings),
        "tokenisation": tokenisation.as_dict(),
        "data": [source_identity(source) for source in settings.data],
        "limit": settings.text.limit,
        "shard_rows": settings.shard_rows,
        # Whether such a sample ends the run or only itself changes no sealed shard.
        "on_bad_values": "keep" if settings.on_bad_values == "keep" else "reject",
        **({"engine_options": engine_identity(settings.engine_options)} if settings.engine == "vllm" else {}),
    }


def shard_metadata(
    identity: dict[str, Any],
    sources: Sequence[str],
    mask_rules: dict[str, int],
    made_with: Mapping[str, str],
    compiled: str,
) -> dict[str, Any]:
    """What each shard says of itself: the identity, and what may differ between runs that agree.

    made_with: what the engine says of itself: the device that it computes on, and its library.
    """
    return {
        **identity,
        "sources": list(sources),
        "mask_rules": mask_rules,
        "made_with": {
            "hiddentap": version("hiddentap"),
            **{name: version(name) for name in _LIBRARIES},
            "python": platform.python_version(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            **made_with,
            # "auto": layers may have been compiled, for the whole shard or a part of it.
            "compiled": compiled,
        },
    }


def _model(loaded: LoadedModel, attached: AttachedModel) -> dict[str, Any]:
    return {
        "id": loaded.source.name,
        "revision": loaded.revision,
        "class": type(attached.decoder.model).__name__,
        "config_sha256": loaded.config_hash,
        "weights_sha256": loaded.weights,
        "weights_dtype": loaded.weights_dtype,
    }


def _taps(settings: CaptureSettings, attached: AttachedModel) -> dict[str, Any]:
    boundaries = attached.taps.boundaries
    ids, convention = settings.layers.told(boundaries)
    return {
        "convention": convention,
        "layer_ids": list(ids),
        "boundaries": list(boundaries),
        "final": settings.final,
        "num_hidden_layers": attached.decoder.n,
        "hidden_size": attached.hidden_size,
        "layers_path": attached.decoder.layers_path,
        "norm_path": attached.norm_path,
        "adapter": attached.decoder.adapter_name,
    }


def _mode(settings: CaptureSettings) -> str:
    if settings.engine == "vllm":
        return "vllm"
    return "exact" if settings.exact else "batched"


def _attention(settings: CaptureSettings, attached: AttachedModel) -> str | None:
    if settings.engine == "vllm":
        return "vllm"
    config = getattr(attached.decoder.model, "config", None)
    return getattr(config, "_attn_implementation", None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
