"""What the files of every run say of how they were made: its model, its taps, and what computed them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import nn

from ..hooks import Taps
from ..models.checkpoint import config_hash
from ..models.decoder import Decoder
from ..models.loading import LoadedModel
from .store import FORMAT_VERSION

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers")


class TappedModel(Protocol):
    """A model with taps on it: what its layers are, H, the dtype it computes in, and where its final norm is."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def taps(self) -> Taps: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def norm_path(self) -> str | None: ...


def tapped_identity(
    tapped: TappedModel, layer_ids: Sequence[int], convention: str, loaded: LoadedModel | None = None
) -> dict[str, Any]:
    """Format, model, taps and how values are computed, as JSON values.

    layer_ids, convention: the taps' boundaries in the words of whoever asked for them.
    loaded: where the model came from, if it was loaded from somewhere known.
    """
    model = tapped.decoder.model
    return {
        "format_version": FORMAT_VERSION,
        "model": _model(model, loaded),
        "taps": _taps(tapped, layer_ids, convention),
        "compute_dtype": dtype_name(tapped.dtype),
        "attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }


def made_with(engine: Mapping[str, str], compiled: str) -> dict[str, Any]:
    """What may differ between runs that agree.

    engine: what computed the rows, in its own words: the device, and a library of its own.
    compiled: "off", or "auto" and "on" where layers may have been compiled, for a whole shard or a part of it.
    """
    return {
        "hiddentap": version("hiddentap"),
        **{name: version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        **engine,
        "compiled": compiled,
    }


def device_name(device: torch.device) -> str:
    """``cpu`` and the like; of a CUDA device what it is."""
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` and the like."""
    return str(dtype).removeprefix("torch.")


def _model(model: nn.Module, loaded: LoadedModel | None) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {
        "id": loaded.source.name if loaded else getattr(config, "_name_or_path", None) or None,
        "revision": loaded.revision if loaded else None,
        "class": type(model).__name__,
        "config_sha256": loaded.config_hash if loaded else config_hash(config),
        "weights_sha256": loaded.weights if loaded else None,
        "weights_dtype": loaded.weights_dtype if loaded else None,
    }


def _taps(tapped: TappedModel, layer_ids: Sequence[int], convention: str) -> dict[str, Any]:
    return {
        "convention": convention,
        "layer_ids": list(layer_ids),
        "boundaries": list(tapped.taps.boundaries),
        "final": tapped.taps.final,
        "num_hidden_layers": tapped.decoder.n,
        "hidden_size": tapped.hidden_size,
        "layers_path": tapped.decoder.layers_path,
        "norm_path": tapped.norm_path,
        "adapter": tapped.decoder.adapter_name,
    }
