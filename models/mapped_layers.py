"""A model whose decoder layers stay in its checkpoint, each in memory only while it is held: a reference for larger models.

transformers' own loading step reads safetensors' own maps of the files, once for what is outside the layers and once whenever a
layer is held. A capture with streamed weights reads and places its layers by other code (`streaming`), so that the two can be
compared.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)

from .checkpoint import CheckpointError
from .loaded_weights import without_progress_bars
from .stored_tensors import StoredTensor, tensors_of_file

L = TypeVar("L")
CPU = torch.device("cpu")


def load_mapped(
    load: Callable[[], L],
    *,
    layers_path: str,
    device: torch.device = CPU,
    converting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[L, MappedLayers]:
    """Call `load`, which calls `from_pretrained`, so that it leaves the layers at `layers_path` on the meta device.

    Args:
        device: where weights go.
        converting: a context around each conversion of weights.

    Returns:
        What `load` returned, and the model's layers.

    Raises:
        CheckpointError: no safetensors files, or the model has no layers at `layers_path`.
    """
    found: list[MappedLayers] = []

    def without_layers(
        model: PreTrainedModel, state_dict: Any, files: Sequence[str] | None, settings: Any, expected_keys: Any = None
    ) -> tuple[Any, None]:
        del expected_keys  # transformers gives it
        if state_dict is not None or not files or not all(file.endswith(".safetensors") for file in files):
            raise CheckpointError("only the layers of safetensors files can be mapped.")
        settings = dataclasses.replace(settings, device_map={"": device})
        layers = MappedLayers(model, layers_path, files, settings, converting)
        found.append(layers)
        return layers.load_outside(), None

    with mock.patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(without_layers)):
        loaded = load()
    if not found:
        raise CheckpointError("no checkpoint was loaded, so it has no layers to map.")
    found[0].loaded(device)
    return loaded, found[0]


class MappedLayers:
    """The decoder layers of a model.

    Attributes:
        modules: the layers, in order.
        unexpected_keys: what the checkpoint has for the layers held so far and the model has no place for.
        bytes_held: bytes, in the files, of all layers held so far, each time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers_path: str,
        files: Sequence[str],
        settings: Any,
        converting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        try:
            self.modules = tuple(model.get_submodule(layers_path).children())
        except AttributeError as error:
            raise CheckpointError(f"{type(model).__name__} has no layers at {layers_path}.") from error
        self.unexpected_keys: set[str] = set()
        self.bytes_held = 0
        self._model, self._settings, self._converting = model, settings, converting
        self._prefixes = [f"{layers_path}.{i}." for i in range(len(self.modules))]
        stored = {one.name: one for file in files for one in tensors_of_file(Path(file))}
        *self._stored, self._outside = self._by_layer(stored)
        self._empty: list[list[tuple[nn.Module, str, Tensor]]] = []

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest layer, as it is computed with."""
        return max(sum(tensor.nbytes for _, _, tensor in empty) for empty in self._empty)

    def load_outside(self) -> Any:
        """Load what is outside the layers; return transformers' LoadStateDictInfo, which does not miss the layers."""
        info = self._read(self._outside)
        own = {name for name in info.missing_keys if self._layer_of(name) < len(self.modules)}
        info.missing_keys -= own
        tensors = self._model.state_dict(keep_vars=True)
        for name in own:
            tensors[name]._is_hf_initialized = True  # else transformers would make up values for it
        return info

    def loaded(self, device: torch.device) -> None:
        """Note which tensors of the loaded model are empty; move the others to `device`."""
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            if tensor.device.type != "meta":
                tensor.data = tensor.data.to(device)
        self._empty = [
            [
                (module, name, tensor)
                for module in layer.modules()
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                if tensor.device.type == "meta"
            ]
            for layer in self.modules
        ]

    @contextmanager
    def held(self, layer: int) -> Iterator[nn.Module]:
        """Keep the weights of `layer` in memory inside the block.

        Raises:
            CheckpointError: some are not in the checkpoint, or do not fit.
        """
        try:
            info = self._read(self._stored[layer])
            self._model._adjust_missing_and_unexpected_keys(info)
            self.unexpected_keys |= info.unexpected_keys
            self.bytes_held += sum(one.bytes for one in self._stored[layer].values())
            absent = [name for module, name, empty in self._empty[layer] if getattr(module, name) is empty]
            faults = [*absent, *map(str, info.mismatched_keys), *info.conversion_errors.values(), *info.error_msgs]
            if faults:
                raise CheckpointError(
                    f"{self._prefixes[layer][:-1]} cannot be read from the checkpoint; missing or unfit: {'; '.join(faults[:3])}"
                )
            yield self.modules[layer].requires_grad_(False)
        finally:
            for module, name, empty in self._empty[layer]:
                setattr(module, name, empty)

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Hold the first of the layers whose tensors have the same names and shapes, inside the block."""
        kinds: dict[Any, int] = {}
        for layer, stored in enumerate(self._stored):
            kind = frozenset((re.sub(r"\d+", "*", key), one.shape) for key, one in stored.items())
            kinds.setdefault(kind, layer)
        with ExitStack() as stack:
            for layer in kinds.values():
                stack.enter_context(self.held(layer))
            yield

    def _read(self, stored: Mapping[str, StoredTensor]) -> Any:
        # A transform remembers what it renamed, so each part gets its own.
        mapping = copy.deepcopy(self._settings.weight_mapping)
        settings = dataclasses.replace(self._settings, weight_mapping=mapping)
        with ExitStack() as opened, self._converting(), without_progress_bars():
            # Closed again: the pages of a file that stays mapped count as memory of the process.
            names = {one.file for one in stored.values()}
            files: dict[Path, Any] = {name: opened.enter_context(safe_open(name, framework="pt")) for name in names}
            slices = {key: files[one.file].get_slice(key) for key, one in stored.items()}
            info, _ = convert_and_load_state_dict_in_model(self._model, slices, settings)
        return info

    def _by_layer(self, stored: Mapping[str, StoredTensor]) -> list[dict[str, StoredTensor]]:
        """Return what the files hold of each layer, and last the rest: weights that layers share are among it."""
        mapping = copy.deepcopy(self._settings.weight_mapping or [])
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        names, prefix = self._model.state_dict(), self._model.base_model_prefix
        found: list[dict[str, StoredTensor]] = [{} for _ in range(len(self.modules) + 1)]
        for key, one in stored.items():
            name, _ = rename_source_key(key, renamings, converters, prefix, names)
            if name not in names and key in names:
                name, _ = rename_source_key(key, [], [], prefix, names)
            found[self._layer_of(name)][key] = one
        return found

    def _layer_of(self, name: str) -> int:
        """Return the layer whose own weight is called `name`, or n."""
        tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        if name in tied or name in tied.values():
            return len(self.modules)
        return next((i for i, prefix in enumerate(self._prefixes) if name.startswith(prefix)), len(self.modules))
