"""The model that a folder is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ...models.loading import LoadedModel, ModelLoadError, ModelSource, load_model
from .declared import Declaration

NO_MODEL = "none"


@dataclass(frozen=True)
class ReferenceModel:
    """What was found.

    Attributes:
        loaded: None where nothing is compared.
        differences: how it differs from the captured one, in words; [] where config and weights are the same.
        note: why nothing is compared.
    """

    loaded: LoadedModel | None
    differences: tuple[str, ...] = ()
    note: str | None = None


def reference_model(declaration: Declaration, model: str | Path | ModelSource | None) -> ReferenceModel:
    """Load `model`, or the one that the header names where that is on this machine and still the same.

    It computes as the captured one did (dtype, attention) where `model` leaves that open. `"none"` loads nothing.
    Raises ModelLoadError or CheckpointError for a `model` that cannot be loaded.
    """
    if model == NO_MODEL:
        return ReferenceModel(None, note="not asked for")
    if model is not None:
        source = model if isinstance(model, ModelSource) else ModelSource(str(model))
        loaded = load_model(_computing_alike(source, declaration))
        return ReferenceModel(loaded, _differences(loaded, declaration.model))
    name = declaration.model.get("id")
    if not name:
        return ReferenceModel(None, note="the headers name no model")
    return _declared_model(ModelSource(str(name), declaration.model.get("revision")), declaration)


def _declared_model(source: ModelSource, declaration: Declaration) -> ReferenceModel:
    if not _is_here(source):
        return ReferenceModel(None, note=f"{source.name} is not on this machine; name its place with --model")
    try:
        loaded = load_model(_computing_alike(source, declaration))
    except ModelLoadError as error:
        return ReferenceModel(None, note=str(error))
    differences = _differences(loaded, declaration.model)
    if differences:
        return ReferenceModel(
            None, differences, f"{source.name} is not what was captured; name the right one with --model"
        )
    return ReferenceModel(loaded)


def _is_here(source: ModelSource) -> bool:
    # A check never starts a download on its own.
    try:
        return cached_file(source.name, "config.json", revision=source.revision, local_files_only=True) is not None
    except OSError:
        return False


def _computing_alike(source: ModelSource, declaration: Declaration) -> ModelSource:
    dtype = declaration.dtype if source.dtype == "auto" else source.dtype
    return replace(
        source, dtype=dtype, attn_implementation=source.attn_implementation or declaration.attn_implementation
    )


def _differences(loaded: LoadedModel, stated: Mapping[str, Any]) -> tuple[str, ...]:
    found = {"config_sha256": ("config", loaded.config_hash), "weights_sha256": ("weight files", loaded.weights)}
    return tuple(
        f"the {what} of {loaded.source.name} are not those of the captured model ({stated[key][:12]} there, {value[:12]} here)"
        for key, (what, value) in found.items()
        if stated.get(key) not in (None, value)
    )
