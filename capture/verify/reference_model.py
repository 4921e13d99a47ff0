"""The model that a folder is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ...models.checkpoint import CheckpointError
from ...models.loaded_model import LoadedModel
from ...models.loading import load_mapped_layers, load_model
from ...models.loading_memory import ModelTooLargeError
from ...models.mapped_layers import MappedLayers
from ...models.model_source import ModelLoadError, ModelSource
from ...models.peft_adapter import CONFIG_FILE, NO_ADAPTER
from .declared import Declaration
from .forwards import InMemory, Lockstep

NO_MODEL = "none"
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class ReferenceModel:
    """What was found.

    Attributes:
        loaded: None where nothing is compared.
        differences: how it differs from the captured one, in words; [] where config and weights are the same.
        note: why nothing is compared.
        layers: those of a model that does not fit in memory, which `loaded` is without; None where it does.
        too_large: why they are apart, in words.
    """

    loaded: LoadedModel | None
    differences: tuple[str, ...] = ()
    note: str | None = None
    layers: MappedLayers | None = None
    too_large: str = ""

    def forwards(self, loaded: LoadedModel) -> InMemory | Lockstep:
        """Return what runs forwards of `loaded`."""
        return InMemory(loaded) if self.layers is None else Lockstep(loaded, self.layers, self.too_large)


def reference_model(
    declaration: Declaration, model: str | Path | ModelSource | None, *, trust_remote_code: bool = False
) -> ReferenceModel:
    """Load `model`, or the one that the header names where that is on this machine and still the same.

    It computes as the captured one did (dtype, attention) where `model` leaves that open. `"none"` loads nothing. Of a model
    that does not fit in memory, the layers stay on disk.
    trust_remote_code: whether code that comes with the model may run, where `model` is no `ModelSource` that says so.
    Raises ModelLoadError or CheckpointError for a `model` that cannot be loaded.
    """
    if model == NO_MODEL:
        return ReferenceModel(None, note="not asked for")
    if model is not None:
        source = (
            model if isinstance(model, ModelSource) else ModelSource(str(model), trust_remote_code=trust_remote_code)
        )
        found = _loaded(_computing_alike(source, declaration), declaration)
        return replace(found, differences=_differences(found.loaded, declaration.model) if found.loaded else ())
    name = declaration.model.get("id")
    if not name:
        return ReferenceModel(None, note="the headers name no model")
    source = ModelSource(str(name), declaration.model.get("revision"), trust_remote_code=trust_remote_code)
    return _declared_model(source, declaration)


def _declared_model(source: ModelSource, declaration: Declaration) -> ReferenceModel:
    if not _is_here(source):
        return ReferenceModel(None, note=f"{source.name} is not on this machine; name its place with --model")
    adapter = declaration.model.get("peft_adapter")
    if adapter not in (None, NO_ADAPTER) and not _has(str(adapter), None, CONFIG_FILE):
        return ReferenceModel(None, note=f"its adapter {adapter} is not on this machine")
    try:
        found = _loaded(_computing_alike(source, declaration), declaration)
    except (ModelLoadError, CheckpointError) as error:
        # It is here and should be comparable: that it is not is a finding, and not the caller's choice.
        return ReferenceModel(
            None, (f"the captured model cannot be loaded to compare with it: {error}",), "it cannot be loaded"
        )
    differences = _differences(found.loaded, declaration.model) if found.loaded else ()
    if differences:
        return ReferenceModel(
            None, differences, f"{source.name} is not what was captured; name the right one with --model"
        )
    return found


def _loaded(source: ModelSource, declaration: Declaration) -> ReferenceModel:
    """Return the model, its layers apart where it does not fit in memory.

    Rows of half precision may be judged beside the weights in float32, which must fit too; layers of a model that is spread over
    devices or has an adapter cannot be apart.
    """
    can_be_apart = source.device_map is None and source.peft in (None, NO_ADAPTER)
    try:
        return ReferenceModel(load_model(source, in_float32=declaration.dtype in HALF and can_be_apart))
    except ModelTooLargeError as too_large:
        if declaration.layers_path is None:  # a folder whose headers do not name the layers
            raise
        loaded, layers = load_mapped_layers(source, declaration.layers_path)
        return ReferenceModel(loaded, layers=layers, too_large=too_large.sizes)


def _is_here(source: ModelSource) -> bool:
    return _has(source.name, source.revision, "config.json")


def _has(name: str, revision: str | None, file: str) -> bool:
    # A check never starts a download on its own.
    try:
        return cached_file(name, file, revision=revision, local_files_only=True) is not None
    except OSError:
        return False


def _computing_alike(source: ModelSource, declaration: Declaration) -> ModelSource:
    # ModelSource refuses what is no dtype's name.
    adapter = declaration.model.get("peft_adapter")
    dtype: Any = declaration.load_dtype if source.dtype == "auto" else source.dtype
    return replace(
        source,
        dtype=dtype,
        keep_quantized=source.keep_quantized or declaration.keeps_quantized,
        attn_implementation=source.attn_implementation or declaration.attn_implementation,
        peft=source.peft or (None if adapter is None else str(adapter)),
    )


def _differences(loaded: LoadedModel, stated: Mapping[str, Any]) -> tuple[str, ...]:
    found = {"config_sha256": ("config", loaded.config_hash), "weights_sha256": ("weight files", loaded.weights)}
    differences = [
        f"the {what} of {loaded.source.name} are not those of the captured model ({stated[key][:12]} there, {value[:12]} here)"
        for key, (what, value) in found.items()
        if stated.get(key) not in (None, value)
    ]
    there, here = stated.get("peft_adapter_sha256"), loaded.peft_adapter
    if stated.get("weights_sha256") is not None and there != here:  # imported rows say nothing of an adapter
        one, other = (str(sha)[:12] if sha else "none" for sha in (there, here))
        differences.append(
            f"the adapter of {loaded.source.name} is not that of the captured model ({one} there, {other} here)"
        )
    return tuple(differences)
