"""Loading a causal language model so that a wrong or half-loaded one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file

from .checkpoint import CheckpointError, check_files, config_hash, fingerprint
from .config import text_config
from .errors import RunError, UsageError
from .hub import unreachable
from .sharded import address

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
DTYPES: tuple[str, ...] = get_args(DtypeName)


class ModelLoadError(UsageError):
    """A model that cannot be loaded as asked."""


@dataclass(frozen=True)
class ModelSource:
    """Which model, and how it computes.

    Attributes:
        name: a folder or a hub id.
        dtype: how the model computes; ``auto`` takes what its config says.
        device: ``auto`` takes the accelerator where there is one. Without effect where `device_map` is given.
        trust_remote_code: whether code that comes with the model may run.
    """

    name: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ModelLoadError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")

    @property
    def torch_device(self) -> torch.device:
        if self.device != "auto":
            try:
                return torch.device(self.device)
            except RuntimeError as error:
                raise ModelLoadError(f"unknown device {self.device!r}: {error}") from error
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and what is known of where it came from.

    Attributes:
        model: on its device, without gradients.
        folder: where its files are.
        config_hash, weights: sha256 of its config and fingerprint of its weight files.
        revision: commit hash of a hub model, None for a folder.
        weights_dtype: dtype of most of its weights, such as ``bfloat16``.
        notes: what the config says and the checkpoint does not, in words.
    """

    model: nn.Module
    source: ModelSource
    folder: Path
    config_hash: str
    weights: str
    revision: str | None
    weights_dtype: str
    notes: tuple[str, ...]

    def require_unchanged(self) -> None:
        """Raise RunError where the weight files are not those any more that were loaded: mapped weights follow their file."""
        if fingerprint(self.folder) != self.weights:
            raise RunError(
                f"the weights in {self.folder} changed while they were in use; what was computed cannot be trusted."
            )


def load_config(source: ModelSource) -> Any:
    """The model's config.

    Raises:
        ModelLoadError: no such folder or id, or it needs remote code that was not allowed.
    """
    fault = unreachable(source.name)
    if fault is not None:
        raise ModelLoadError(f"{source.name} cannot be loaded as a model: {fault}.")
    try:
        return AutoConfig.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{source.name} cannot be loaded as a model: {_first_line(error)}") from error


def load_model(source: ModelSource, tp: int = 1) -> LoadedModel:
    """Load the model named by `source`.

    A causal language model class is tried first, then an image-text one (Kimi-K2.5 and others, used with text). With `tp`
    above 1 this process holds a part of every layer, on its own accelerator, by the model's tensor-parallel plan; the others
    of its process group, `tp` in all, hold the rest, and all of them call this.

    Raises:
        CheckpointError: weight files are missing or damaged, or weights of the model are in none of them.
        ModelLoadError: anything else that keeps it from being loaded as asked.
    """
    config = load_config(source)
    folder = _folder(source)
    if Path(source.name).is_dir():  # the files of a hub model are fetched, or found missing, by loading it
        check_files(folder)
    if tp > 1:
        _require_split(source, config, tp)
    model, info = _load(source, _auto_class(source, config), tp)
    missing = _missing(model, info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of {type(model).__name__} are not in {source.name} and would be random: "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. The checkpoint is incomplete or of another model."
        )
    if source.device_map is None and tp == 1:
        model.to(source.torch_device)
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        source=source,
        folder=folder,
        config_hash=config_hash(config),
        weights=fingerprint(folder),
        revision=getattr(config, "_commit_hash", None),
        weights_dtype=_main_dtype(model),
        notes=tuple(_disagreements(model, config, info["unexpected_keys"], source)),
    )


def model_skeleton(source: ModelSource) -> nn.Module:
    """The model of `source` without its weights, on the meta device; raises `ModelLoadError`."""
    config = load_config(source)
    try:
        with torch.device("meta"):
            model: nn.Module = _auto_class(source, config).from_config(
                config, trust_remote_code=source.trust_remote_code
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"{source.name} cannot be built from its config: {_first_line(error)}") from error
    return model


def describe_model(source: ModelSource) -> LoadedModel:
    """The model of `source` on the meta device, in the dtype it computes in: all that is known of it but its weights' values.

    Raises:
        CheckpointError, ModelLoadError: as `load_model`, but for what only loading the weights shows.
    """
    config = load_config(source)
    folder = _folder(source)
    check_files(folder)
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
        weights_dtype=_main_dtype(model),
        notes=(),
    )


def _folder(source: ModelSource) -> Path:
    path = cached_file(source.name, "config.json", revision=source.revision)
    return Path(path).parent


def _auto_class(source: ModelSource, config: Any) -> Any:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        remote = source.trust_remote_code and auto.__name__ in getattr(config, "auto_map", {})
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


def _load(source: ModelSource, auto: Any, tp: int) -> tuple[nn.Module, dict[str, Any]]:
    chosen = {
        "device_map": source.device_map,
        "attn_implementation": source.attn_implementation,
        "distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto") if tp > 1 else None,
    }
    try:
        model, info = auto.from_pretrained(
            source.name,
            revision=source.revision,
            dtype="auto" if source.dtype == "auto" else getattr(torch, source.dtype),
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            **{name: value for name, value in chosen.items() if value is not None},
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"{source.name} cannot be loaded: {_first_line(error)}") from error
    return model, info


def _missing(model: nn.Module, keys: Sequence[str]) -> list[str]:
    """Those of `keys` whose memory no loaded weight shares: tying is seen in the storage, not believed from the config."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    absent = set(keys)
    loaded = {address(t) for name, t in tensors.items() if name not in absent and t.device.type != "meta"}
    return sorted(name for name in absent if name in tensors and address(tensors[name]) not in loaded)


def _disagreements(model: nn.Module, config: Any, unexpected: Sequence[str], source: ModelSource) -> list[str]:
    notes = []
    if unexpected:
        shown = ", ".join(sorted(unexpected)[:3])
        notes.append(f"{len(unexpected)} weights of the checkpoint have no place in {type(model).__name__}: {shown}")
    stated = getattr(config, "dtype", None)
    found = _main_dtype(model)
    if source.dtype == "auto" and isinstance(stated, torch.dtype) and str(stated).removeprefix("torch.") != found:
        notes.append(f"the config says {stated} and most weights are {found}")
    tied, says_tied = _is_tied(model), bool(getattr(config, "tie_word_embeddings", False))
    if tied is not None and tied != says_tied:
        notes.append(
            f"the config says tie_word_embeddings={says_tied}, but head and embeddings are {'one' if tied else 'two'} in memory"
        )
    return notes


def _is_tied(model: Any) -> bool | None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(embedding, "weight", None) is None or getattr(head, "weight", None) is None:
        return None
    return address(embedding.weight) == address(head.weight)


def _main_dtype(model: nn.Module) -> str:
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return str(max(counts, key=lambda d: counts[d])).removeprefix("torch.") if counts else "none"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
