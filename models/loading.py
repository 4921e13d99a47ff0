"""Loading a causal language model so that a wrong or half-loaded one is refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file

from .call import input_device, without_cache
from .checkpoint import check_files, config_hash, fingerprint
from .config import text_config
from .errors import HiddentapError
from .foreign_folder import without_config
from .fp8_blocks import blocks_of_the_config
from .hub import unreachable
from .loaded_model import LoadedModel
from .loaded_weights import disagreements, main_dtype, require_used, require_whole
from .loading_memory import require_room
from .mapped_layers import MappedLayers, load_mapped
from .model_source import ModelLoadError, ModelSource, first_line
from .native_class import has_remote_class, native_config
from .peft_adapter import NOT_BY_LOADING, PeftAdapter, require_no_adapter
from .published_form import PublishedForm, published_form
from .readable_form import OTHER_RELEASE, require_consumed, require_readable, require_word_of_quantization
from .remote_buffers import build_buffers, is_remote
from .spot_check import require_dequantized
from .streaming import LayerStore, load_streamed


def load_config(source: ModelSource) -> Any:
    """Return the model's config, by transformers' own class wherever it has one of the architecture that the config names.

    Raises:
        ModelLoadError: no such folder or id, a form without a config, or it needs remote code that was not allowed.
    """
    fault = without_config(Path(source.name)) or unreachable(source.name)
    if fault is not None:
        raise ModelLoadError(f"{source.name} cannot be loaded as a model: {fault}.")
    with _naming(f"{source.name} cannot be loaded as a model"):
        config = native_config(source.name, source.revision)
        if config is not None:
            return config
        return AutoConfig.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
        )


def load_model(source: ModelSource, tp: int = 1, *, in_float32: bool = False) -> LoadedModel:
    """Load the model named by `source`.

    A causal language model class is tried first, then an image-text one (Kimi-K2.5 and others, used with text). With `tp`
    above 1 this process holds a part of every layer, on its own accelerator, by the model's tensor-parallel plan; the others
    of its process group, `tp` in all, hold the rest, and all of them call this.

    in_float32: whether the memory must hold its weights in float32 too, in place of the loaded ones.

    Raises:
        ModelTooLargeError: it does not fit in the memory that is free.
        CheckpointError: weight files are missing or damaged, weights of the model are in none of them, or they are in a form
            that nothing here reads rightly.
        ModelLoadError: anything else that keeps it from being loaded as asked.
    """
    asked = _Asked.of(source)
    if tp > 1:
        _require_split(source, asked.config, tp)
        if asked.adapter is not None:
            raise ModelLoadError(_merged(source, "split over processes"))
    elif not source.keep_quantized:
        asked.require_room(in_float32=in_float32)
    model, info = _load(source, asked.config, asked.form, tp)
    asked = asked.with_fetched_files()
    notes = _checked(model, asked.config, asked.form, info, source)
    if asked.adapter is not None:
        notes += asked.adapter.apply(model, source.name)
    if source.device_map is None and tp == 1:
        model.to(source.torch_device)
    if asked.form.method == "compressed-tensors" and source.keep_quantized:
        _decompress(model)
    return asked.loaded(model, notes)


def load_layer_by_layer(source: ModelSource, *, head: bool = False) -> tuple[LoadedModel, LayerStore]:
    """Load the model named by `source` without its decoder layers, which the store loads one at a time.

    Args:
        head: whether to load the output projection; without, it stays on the meta device unless it is tied.

    Raises:
        CheckpointError, ModelLoadError: as `load_model`; the checkpoint has no safetensors files, or a device map is asked for.
    """
    return _load_without_layers(source, partial(load_streamed, head=head))


def load_mapped_layers(source: ModelSource, layers_path: str) -> tuple[LoadedModel, MappedLayers]:
    """Load the model named by `source` without its decoder layers, which lie at `layers_path` and can be held one at a time.

    Raises:
        CheckpointError, ModelLoadError: as `load_layer_by_layer`.
    """
    return _load_without_layers(source, partial(load_mapped, layers_path=layers_path))


class _Layers(Protocol):
    """The layers that a model was loaded without."""

    unexpected_keys: set[str]

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]: ...


P = TypeVar("P", bound=_Layers)


def _load_without_layers(source: ModelSource, load_apart: Callable[..., tuple[Any, P]]) -> tuple[LoadedModel, P]:
    if source.device_map is not None:
        raise ModelLoadError("a streamed model lies on one device; leave device_map out.")
    if source.keep_quantized:
        raise ModelLoadError("the weights of a streamed model are dequantized; leave keep_quantized out.")
    asked = _Asked.of(source)
    if asked.adapter is not None:
        raise ModelLoadError(_merged(source, "streamed"))
    (model, info), layers = load_apart(
        lambda: _load(source, asked.config, asked.form, tp=1),
        device=source.torch_device,
        converting=partial(blocks_of_the_config, asked.form.block_size),
    )
    asked = asked.with_fetched_files()
    with layers.one_layer_of_each_kind():
        info = {**info, "unexpected_keys": {*info["unexpected_keys"], *layers.unexpected_keys}}
        notes = _checked(model, asked.config, asked.form, info, source)
    return asked.loaded(model, notes), layers


@dataclass(frozen=True)
class _Asked:
    """A model that was found and not loaded yet."""

    source: ModelSource
    config: Any
    folder: Path
    form: PublishedForm
    adapter: PeftAdapter | None

    @classmethod
    def of(cls, source: ModelSource) -> _Asked:
        source.require_device()
        config = load_config(source)
        folder = _folder(source)
        if Path(source.name).is_dir():  # the files of a hub model are fetched, or found missing, by loading it
            check_files(folder)
        form = _readable_form(source, folder, config)
        return cls(source, config, folder, form, _adapter(source))

    def require_room(self, *, in_float32: bool) -> None:
        """Raise ModelTooLargeError where the weights do not fit; of forms that stay quantized in memory it is not known."""
        if self.form.is_quantized and not self.form.is_dequantized:
            return
        stated = getattr(self.config, "dtype", None) or torch.float32
        dtype = stated if self.source.dtype == "auto" else getattr(torch, self.source.dtype)
        device = self.source.torch_device if self.source.device_map is None else None
        skeleton = partial(model_skeleton, self.source)
        require_room(self.form, skeleton, dtype, device, self.source.name, in_float32=in_float32)

    def with_fetched_files(self) -> _Asked:
        """Look again at the form where the weight files of a hub model were not there before it was loaded."""
        if self.form.tensors:
            return self
        return replace(self, form=_readable_form(self.source, self.folder, self.config))

    def loaded(self, model: nn.Module, notes: list[str]) -> LoadedModel:
        model.eval().requires_grad_(False)
        return LoadedModel(
            model=model,
            source=self.source,
            folder=self.folder,
            config_hash=config_hash(self.config),
            weights=fingerprint(self.folder),
            revision=getattr(self.config, "_commit_hash", None),
            weights_dtype=main_dtype(model),
            notes=tuple(notes),
            form=self.form,
            peft_adapter=None if self.adapter is None else self.adapter.sha256,
        )


def _readable_form(source: ModelSource, folder: Path, config: Any) -> PublishedForm:
    form = published_form(folder, config)
    require_readable(form, source.name)
    return form


def _adapter(source: ModelSource) -> PeftAdapter | None:
    adapter = PeftAdapter.of(source.peft, source.name, source.revision)
    if adapter is not None:
        adapter.require_peft(source.name)
    return adapter


def _merged(source: ModelSource, how: str) -> str:
    return (
        f"{source.name} has an adapter, which cannot be {how}; merge it into the weights first (peft: merge_and_unload, then "
        "save_pretrained)."
    )


def _checked(model: Any, config: Any, form: PublishedForm, info: Mapping[str, Any], source: ModelSource) -> list[str]:
    """Return notes on the loaded model; raise CheckpointError if its values would be wrong."""
    unexpected = sorted(info["unexpected_keys"])
    notes = require_consumed(form, unexpected, source.name)
    require_whole(model, info["missing_keys"], source.name)
    notes += require_used(model, unexpected, source.name)
    require_dequantized(model, form, source.name)
    if is_remote(model):
        build_buffers(model)
    elif has_remote_class(config):
        notes.append(
            f"transformers' own {type(model).__name__} computes it, not the code that comes with the checkpoint"
        )
    return notes + disagreements(model, config, dtype_is_open=source.dtype == "auto" and not form.is_quantized)


@torch.no_grad()
def _decompress(model: Any) -> None:
    """Run one token: compressed-tensors unpacks in the first forward, and tensors of inference mode cannot be cast later."""
    model(torch.zeros(1, 1, dtype=torch.int64, device=input_device(model)), **without_cache(model))


def local_form(source: ModelSource) -> PublishedForm | None:
    """Return the form of the checkpoint where its weight files are on this machine, else None; raises `ModelLoadError`."""
    form = published_form(_folder(source), load_config(source))
    return form if form.tensors else None


def model_skeleton(source: ModelSource) -> nn.Module:
    """Return the model of `source` without its weights, on the meta device; raises `ModelLoadError`."""
    config = load_config(source)
    with _naming(f"{source.name} cannot be built from its config"), torch.device("meta"):
        model: nn.Module = _auto_class(source, config).from_config(
            config, trust_remote_code=source.runs_code_of(config)
        )
    return model


def describe_model(source: ModelSource) -> LoadedModel:
    """Return the model of `source` on the meta device in its compute dtype: everything but the weights' values.

    Raises:
        CheckpointError, ModelLoadError: as `load_model`, but for what only loading the weights shows.
    """
    config = load_config(source)
    folder = _folder(source)
    check_files(folder)
    form = published_form(folder, config)
    require_word_of_quantization(form, source.name)
    require_no_adapter(PeftAdapter.of(source.peft, source.name, source.revision), source.name)
    model = model_skeleton(source)
    stated = getattr(config, "dtype", None)
    if source.dtype != "auto":
        model.to(getattr(torch, source.dtype))
    elif isinstance(stated, torch.dtype):
        model.to(stated)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        source=source,
        folder=folder,
        config_hash=config_hash(config),
        weights=fingerprint(folder),
        revision=getattr(config, "_commit_hash", None),
        weights_dtype=main_dtype(model),
        notes=(),
        form=form,
    )


def _folder(source: ModelSource) -> Path:
    path = cached_file(source.name, "config.json", revision=source.revision)
    return Path(path).parent


def _auto_class(source: ModelSource, config: Any) -> Any:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        remote = source.runs_code_of(config) and auto.__name__ in getattr(config, "auto_map", {})
        if remote or type(config) in auto._model_mapping:
            return auto
    raise ModelLoadError(
        f"{source.name} is a {config.model_type!r} model; expected a causal language model or an image-text model."
    )


def _require_split(source: ModelSource, config: Any, tp: int) -> None:
    """Raise ModelLoadError unless the layers of such a model can be split over `tp` processes."""
    text = text_config(config)
    if source.device != "auto" or source.device_map is not None:
        raise ModelLoadError(
            "a tensor-parallel model lies on the accelerator of each of its processes; leave device and device_map out."
        )
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelLoadError(
            f"{source.name} has no tensor-parallel plan: {type(text).__name__} says nothing of how its layers are split "
            "(base_model_tp_plan). Spread it over devices with device_map='auto' instead."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % tp:
            raise ModelLoadError(f"{source.name} has {name}={heads}, which tp={tp} processes cannot share evenly.")


def _load(source: ModelSource, config: Any, form: PublishedForm, tp: int) -> tuple[nn.Module, dict[str, Any]]:
    auto = _auto_class(source, config)
    chosen = {
        "device_map": source.device_map,
        "attn_implementation": source.attn_implementation,
        "distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto") if tp > 1 else None,
        **NOT_BY_LOADING,
    }
    try:
        # Quantizers greet on standard output, which is the caller's.
        with blocks_of_the_config(form.block_size), redirect_stdout(sys.stderr):
            model, info = auto.from_pretrained(
                source.name,
                config=_to_load(config, form, source),
                revision=source.revision,
                dtype="auto" if source.dtype == "auto" else getattr(torch, source.dtype),
                trust_remote_code=source.runs_code_of(config),
                output_loading_info=True,
                **{name: value for name, value in chosen.items() if value is not None},
            )
    except HiddentapError:
        raise
    except Exception as error:
        why = _reason(error)
        if "CONVERSION" in why:  # points to a report that only transformers' own log has
            why = f"transformers cannot turn its stored weights into those of {config.model_type} ({form}). {OTHER_RELEASE}"
        if "ignore_mismatched_sizes" in why:  # so does this
            why = (
                f"some of its weights have other shapes than those of the {config.model_type} model in its config.json; "
                "the files are of another model, or sizes in the config are wrong"
            )
        raise ModelLoadError(f"{source.name} cannot be loaded: {why}") from error
    return model, info


def _to_load(config: Any, form: PublishedForm, source: ModelSource) -> Any:
    """Return a config of its own for loading, which writes into it; weights are dequantized where that is asked for."""
    copied = copy.deepcopy(config)
    if form.is_dequantized and not source.keep_quantized:
        copied.quantization_config = {**form.fields, "dequantize": True}
    return copied


@contextmanager
def _naming(fault: str) -> Iterator[None]:
    """Make a ModelLoadError, `fault` and the reason, of whatever the classes of a config or a model raise over its values."""
    try:
        yield
    except HiddentapError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{fault}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first informative line of an error; for an error not meant for users, the value to look for."""
    if isinstance(error, StrictDataclassError):
        return "its config.json: " + " ".join(str(error).split())
    if isinstance(error, (OSError, ValueError, ImportError, RuntimeError)):
        return first_line(error)
    return f"a value in its config.json is not what its class expects ({type(error).__name__}: {first_line(error)})"
