"""Load decoder layers one by one: each is bit for bit what `from_pretrained` would have loaded.

transformers converts what it loads (fuses experts, renames keys, dequantizes) by a mapping that works on any part of a
checkpoint. Its loading step runs here once for each layer, with the settings that `from_pretrained` made.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model

from ..checkpoint import CheckpointError
from ..decoder import Decoder
from ..errors import RunError
from ..loaded_weights import without_progress_bars
from .checkpoint_reader import CheckpointReader, LazyTensor
from .dry_forward import changes_weights
from .memory_needs import StreamedNeeds
from .one_thread import in_one_thread

Keys = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class LoadPart:
    """Loads any part of a checkpoint into its model, by the settings that `from_pretrained` made.

    Attributes:
        settings: transformers' LoadStateDictConfig.
        device: where the weights go.
        converting: a context around the conversion of weights.
    """

    settings: Any
    device: torch.device
    converting: Callable[[], AbstractContextManager[None]]

    def __call__(self, model: PreTrainedModel, keys: Keys) -> Any:
        """Return transformers' LoadStateDictInfo of what was loaded."""
        # A transform remembers what it renamed, so each part gets its own.
        mapping = copy.deepcopy(self.settings.weight_mapping)
        settings = dataclasses.replace(self.settings, weight_mapping=mapping, device_map={"": self.device})
        with self.converting(), in_one_thread(), _beside_the_forward(self.device), without_progress_bars():
            info, _ = convert_and_load_state_dict_in_model(model, dict(keys), settings)
        return info


@contextmanager
def _beside_the_forward(device: torch.device) -> Iterator[None]:
    """Copy to an accelerator in a stream of its own inside the block, and wait for it at the end, in this thread alone."""
    if device.type == "cpu":
        yield
        return
    stream = torch.Stream(device)
    with stream:
        yield
    stream.synchronize()


class LayerStore:
    """The decoder layers of a model, in memory or on disk.

    Attributes:
        decoder: the model's decoder; the parameters of a layer that is not loaded are on the meta device.
        reader: reads the checkpoint and counts the bytes.
        unexpected_keys: what the checkpoint has for the layers loaded so far and the model has no place for.
    """

    def __init__(self, decoder: Decoder, reader: CheckpointReader, part: LoadPart, keys: Sequence[Keys]) -> None:
        """`part` loads a part of the checkpoint. `keys`: what the checkpoint holds of each layer."""
        self.decoder, self.reader = decoder, reader
        self._part, self._keys = part, keys
        self._places = [_Place.all_of(layer) for layer in decoder.layers]
        self.unexpected_keys: set[str] = set()
        self._loaded: set[int] = set()
        self._lock = threading.Lock()  # the loading step reads the whole model's state dict

    @property
    def n(self) -> int:
        return self.decoder.n

    def bytes_of(self, layer: int) -> int:
        """Return the bytes of `layer` in the checkpoint."""
        return sum(lazy.stored.bytes for lazy in self._keys[layer].values())

    @property
    def needs(self) -> StreamedNeeds:
        """Return what the model takes in memory, layers and what is loaded beside them, and what its layers take on disk."""
        layer = max(sum(p.placeholder.nbytes for p in places) for places in self._places)
        outside = {id(p): p.nbytes for p in self.decoder.model.parameters() if p.device.type != "meta"}
        return StreamedNeeds(layer, sum(outside.values()), tuple(self.bytes_of(i) for i in range(self.n)))

    def load(self, layer: int) -> None:
        """Read `layer` and put its weights in place; do nothing where they are.

        Raises:
            CheckpointError: a weight of the layer is missing, does not fit or cannot be read.
        """
        with self._lock:
            if layer in self._loaded:
                return
            self._require_unchanged(layer)
            try:
                self._read(layer)
            except BaseException:
                self._unload(layer)
                raise
            for place in self._places[layer]:
                place.follow_placeholder()
                place.used_by_forwards(self._part.device)
            self._loaded.add(layer)

    def _require_unchanged(self, layer: int) -> None:
        """Raise RunError where the model's own code wrote to the weights of `layer` while they were not loaded."""
        changed = [place.name for place in self._places[layer] if place.was_changed]
        if changed:
            raise RunError(changes_weights(self.decoder, f"{self.decoder.layer_path(layer)}.{changed[0]}"))

    def _read(self, layer: int) -> None:
        """Read the weights of `layer` into their places; raise CheckpointError naming those that are missing or do not fit."""
        model = cast(PreTrainedModel, self.decoder.model)
        info = self._part(model, self._keys[layer])
        model._adjust_missing_and_unexpected_keys(info)  # those that the model's class passes over on purpose
        self.unexpected_keys |= info.unexpected_keys
        absent = [place.name for place in self._places[layer] if place.is_empty]
        faults = [*absent, *map(str, info.mismatched_keys), *info.conversion_errors.values(), *info.error_msgs]
        if faults:
            raise CheckpointError(
                f"{self.decoder.layer_path(layer)} cannot be loaded from the checkpoint; missing or unfit: "
                f"{'; '.join(faults[:3])}{' ...' if len(faults) > 3 else ''}."
            )

    @contextmanager
    def without_head(self) -> Iterator[None]:
        """Let forwards inside the block pass an output projection that is not loaded: it gives zeros."""
        head = cast(PreTrainedModel, self.decoder.model).get_output_embeddings()
        absent = [p for p in (head.parameters() if head is not None else ()) if p.device.type == "meta"]
        if head is None or not absent:
            yield
            return
        V = absent[0].shape[0]  # of the weight (V, H) or the bias (V,)
        with mock.patch.object(head, "forward", lambda states: states.new_zeros((*states.shape[:-1], V))):
            yield

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Keep the first layer of each kind loaded inside the block; layers of a kind store tensors of equal shapes."""
        kinds: dict[frozenset[tuple[str, tuple[int, ...]]], int] = {}
        for layer, keys in enumerate(self._keys):
            kind = frozenset((re.sub(r"\d+", "*", key), lazy.stored.shape) for key, lazy in keys.items())
            kinds.setdefault(kind, layer)
        try:
            for layer in kinds.values():
                self.load(layer)
            yield
        finally:
            for layer in kinds.values():
                self.release(layer)

    def release(self, layer: int) -> None:
        """Drop the weights of `layer` from memory; do nothing where they are not there."""
        with self._lock:
            if layer in self._loaded:
                self._unload(layer)

    def _unload(self, layer: int) -> None:
        for place in self._places[layer]:
            place.empty()
        self._loaded.discard(layer)


@dataclass(frozen=True)
class _Place:
    """The place of one weight of a decoder layer, with its placeholder (on the meta device) while it is not loaded."""

    name: str
    module: nn.Module
    attribute: str
    placeholder: Tensor
    version: int

    @classmethod
    def all_of(cls, layer: nn.Module) -> list[_Place]:
        return [
            cls(f"{path}.{name}" if path else name, module, name, tensor, tensor._version)
            for path, module in layer.named_modules()
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if tensor.device.type == "meta"
        ]

    @property
    def is_empty(self) -> bool:
        return getattr(self.module, self.attribute) is self.placeholder

    def follow_placeholder(self) -> None:
        """Freeze the loaded weight where its placeholder is frozen: matmul picks its kernel, and so its rounding, by that too."""
        if not self.placeholder.requires_grad:
            getattr(self.module, self.attribute).requires_grad_(False)

    def used_by_forwards(self, device: torch.device) -> None:
        """Tell the allocator that forwards read the weight in a stream other than the one it was copied in."""
        if device.type != "cpu":
            getattr(self.module, self.attribute).record_stream(torch.accelerator.current_stream(device))

    @property
    def was_changed(self) -> bool:
        """Return whether the model's own code changed the weight in place while it was not loaded."""
        return self.placeholder._version != self.version

    def empty(self) -> None:
        setattr(self.module, self.attribute, self.placeholder)
