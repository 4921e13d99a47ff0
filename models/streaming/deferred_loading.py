"""Load a model without its decoder layers: transformers' loading step is called for what stands outside them alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..checkpoint import CheckpointError
from ..decoder import Decoder, DecoderNotFoundError, find_decoder
from .checkpoint_reader import CheckpointReader, LazyTensor
from .dry_forward import require_streamable
from .layer_store import Keys, LayerStore, LoadPart

L = TypeVar("L")
CPU = torch.device("cpu")


def load_streamed(
    load: Callable[[], L],
    *,
    head: bool = False,
    device: torch.device = CPU,
    converting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[L, LayerStore]:
    """Call `load`, which calls `from_pretrained`, so that it loads no decoder layer.

    Args:
        head: whether to load the output projection; without, it stays on the meta device unless it is tied.
        device: where weights go.
        converting: a context around each conversion of weights.

    Returns:
        What `load` returned, and the store of the model's layers.

    Raises:
        CheckpointError: no safetensors files, a damaged one, or a model that did not come from a checkpoint.
        DecoderNotFoundError: its layers are not found without weights.
        UsageError: as `require_streamable`.
    """
    deferring = _Deferring(head=head, device=device, converting=converting)
    with mock.patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(deferring)):
        loaded = load()
    if deferring.parts is None:
        raise CheckpointError("no checkpoint was loaded, so there are no layers to stream.")
    decoder, *_ = deferring.parts
    _move_what_is_loaded(decoder.model, device)
    return loaded, LayerStore(*deferring.parts)


class _Deferring:
    """Stands for the loading step of `from_pretrained` and leaves the decoder layers for later."""

    def __init__(
        self, *, head: bool, device: torch.device, converting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.parts: tuple[Decoder, CheckpointReader, LoadPart, list[dict[str, LazyTensor]]] | None = None
        self._head, self._device, self._converting = head, device, converting

    def __call__(
        self,
        model: PreTrainedModel,
        state_dict: Mapping[str, Tensor] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        expected_keys: Sequence[str] | None = None,  # noqa: ARG002 - transformers gives it
    ) -> tuple[Any, None]:
        if (
            state_dict is not None
            or not checkpoint_files
            or not all(f.endswith(".safetensors") for f in checkpoint_files)
        ):
            raise CheckpointError(
                "only safetensors files can be streamed; save this checkpoint with save_pretrained()."
            )
        decoder = _found_without_weights(model)
        require_streamable(decoder)
        reader = CheckpointReader([Path(file) for file in checkpoint_files])
        later = [f"{decoder.layer_path(i)}." for i in range(decoder.n)] + ([] if self._head else _head_names(model))
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        shared = {*tied, *tied.values()}
        parts = _by_place(model, reader.tensors, load_config.weight_mapping, later, shared)
        part = LoadPart(load_config, self._device, self._converting)
        self.parts = decoder, reader, part, parts[: decoder.n]
        info = part(model, parts[-1])
        deferred = {name for name in model.state_dict() if name.startswith(tuple(later)) and name not in shared}
        info.missing_keys -= deferred
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in deferred:
                tensor._is_hf_initialized = True  # else transformers would make up values for it
        return info, None


def _found_without_weights(model: PreTrainedModel) -> Decoder:
    try:
        return find_decoder(model)
    except DecoderNotFoundError as error:
        raise DecoderNotFoundError(
            f"{error} Streamed weights need layers that are found without running the model; run it without --stream-weights."
        ) from error


def _move_what_is_loaded(model: nn.Module, device: torch.device) -> None:
    """Move the weights and buffers that are there to `device`; those on the meta device stay."""
    for module in model.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.device.type not in ("meta", device.type):
                moved = tensor.to(device)
                setattr(module, name, nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved)


def _head_names(model: PreTrainedModel) -> list[str]:
    """Names of the output projection's weights, unless they are tied to weights that are loaded."""
    head = model.get_output_embeddings()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    paths = [path for path, module in model.named_modules() if module is head]
    names = [f"{path}.{name}" for path in paths for name, _ in cast(nn.Module, head).named_parameters()]
    return [name for name in names if name not in tied]


def _by_place(
    model: PreTrainedModel, tensors: Keys, mapping: Any, prefixes: Sequence[str], resident: set[str]
) -> list[dict[str, LazyTensor]]:
    """Return the tensors of a checkpoint whose name in the model begins with each of `prefixes`, and last the others.

    `resident`: names that belong to the others although they begin so: weights that several layers share.
    """
    mapping = copy.deepcopy(mapping or [])  # a transform remembers what it renamed
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = model.state_dict()
    parts: list[dict[str, LazyTensor]] = [{} for _ in range(len(prefixes) + 1)]
    for key, stored in tensors.items():
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, _ = rename_source_key(key, [], [], model.base_model_prefix, names)
        at = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix) and name not in resident), -1)
        parts[at][key] = stored
    return parts
