"""Provenance in the files of every run: its model, its taps, and what computed them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..hooks import Taps
from ..models.checkpoint import changed_weights, config_hash
from ..models.decoder import Decoder
from ..models.errors import RunError, UsageError
from ..models.loaded_model import LoadedModel
from .progress import Progress, Silent
from .store import FORMAT_VERSION, TapsDescription, differences
from .weights_read import checked_weight_sums

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
        "model": model_identity(model, loaded),
        "taps": _taps(tapped, layer_ids, convention),
        "compute_dtype": dtype_name(tapped.dtype),
        "attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }


def identity_differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the identity that `there` records and the identity `now`, one per line.

    Where a model lies is no part of it: its config and its weights are.
    """
    return differences({key: there.get(key) for key in now} | _without_id(there), dict(now) | _without_id(now))


def require_none(changed: list[str], folder: Path) -> None:
    """Raise UsageError listing what differs between the run that filled `folder` and this one."""
    if changed:
        raise UsageError(
            f"{folder} holds another run; choose another folder, or ask for the same again. What differs (there -> now):\n  "
            + "\n  ".join(changed)
        )


def require_same_weights(
    stated: Mapping[str, str] | None,
    weights: Path,
    folder: Path,
    check_stop: Callable[[], None],
    progress: Progress | None = None,
) -> None:
    """Check that the weights are bit for bit those that the run in `folder` began with.

    Args:
        stated: `weight_sums` of that run; None, of an earlier release, checks nothing.
        weights: the folder that they lie in now.
        progress: receives reports of the reading; None shows nothing.

    Raises:
        RunError: naming each file that changed.
    """
    changed = (
        []
        if stated is None
        else changed_weights(stated, checked_weight_sums(weights, progress or Silent(), check_stop))
    )
    if changed:
        raise RunError(
            f"the weights in {weights} are not those that the run in {folder} began with: {'; '.join(changed)}. Fetch "
            "the model again, or choose another folder."
        )


def made_with(engine: Mapping[str, str], compiled: str) -> dict[str, Any]:
    """Return provenance that may differ between runs that agree.

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


def _without_id(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": {key: value for key, value in (identity.get("model") or {}).items() if key != "id"}}


def model_identity(model: nn.Module, loaded: LoadedModel | None) -> dict[str, Any]:
    """Return which model it is, and which weights, as JSON values."""
    config = getattr(model, "config", None)
    return {
        "id": loaded.source.place if loaded else getattr(config, "_name_or_path", None) or None,
        "revision": loaded.revision if loaded else None,
        "class": type(model).__name__,
        "config_sha256": loaded.config_hash if loaded else config_hash(config),
        "weights_sha256": loaded.weights if loaded else None,
        "weights_dtype": loaded.weights_dtype if loaded else None,
        **(loaded.published if loaded else {}),
    }


def _taps(tapped: TappedModel, layer_ids: Sequence[int], convention: str) -> dict[str, Any]:
    return TapsDescription(
        convention=convention,
        layer_ids=tuple(layer_ids),
        boundaries=tuple(tapped.taps.boundaries),
        final=tapped.taps.final,
        n=tapped.decoder.n,
        H=tapped.hidden_size,
        layers_path=tapped.decoder.layers_path,
        norm_path=tapped.norm_path,
        adapter=tapped.decoder.adapter_name,
    ).as_json()
