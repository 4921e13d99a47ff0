"""The contents of one layer of a transformers cache: its tensors, and the plain values beside them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ....models.errors import RunError


@dataclass(frozen=True)
class LayerKind:
    """One class of cache layers.

    tensors: attribute to its batch dimension.
    states: attributes that are dicts of tensors, all with the batch in dimension 0.
    fixed: attributes that the model's config decides.
    grows: attributes that say how much the layer has seen; they must agree between layers that are merged.
    rolls_back: whether the last positions can be taken off again.
    """

    tensors: Mapping[str, int] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    grows: tuple[str, ...] = ()
    rolls_back: bool = True


_KEYS_VALUES = {"keys": 0, "values": 0}
_LINEAR_STATES = ("conv_states", "recurrent_states")
_LINEAR_GROWS = ("has_previous_state", "conv_kernel_size", "record_past")
_WINDOW_GROWS = ("cumulative_length", "record_past")
_COMPRESSED_STATES = ("buffer_kv", "buffer_gate", "compressed_kv")

_CACHE_UTILS = "transformers.cache_utils."
_DEEPSEEK_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4."
_MINIMAX_M3 = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl."

KINDS: Mapping[str, LayerKind] = {
    _CACHE_UTILS + "DummyLayer": LayerKind(),
    _CACHE_UTILS + "DynamicLayer": LayerKind(_KEYS_VALUES),
    _CACHE_UTILS + "DynamicSlidingWindowLayer": LayerKind(_KEYS_VALUES, fixed=("sliding_window",), grows=_WINDOW_GROWS),
    _CACHE_UTILS + "DynamicIndexedLayer": LayerKind(_KEYS_VALUES | {"indexer_keys": 0, "indexer_position_ids": 1}),
    _CACHE_UTILS + "LinearAttentionLayer": LayerKind(
        states=_LINEAR_STATES, fixed=("number_of_states",), grows=_LINEAR_GROWS
    ),
    _CACHE_UTILS + "LinearAttentionAndFullAttentionLayer": LayerKind(
        _KEYS_VALUES, _LINEAR_STATES, fixed=("number_of_states",), grows=_LINEAR_GROWS
    ),
    _CACHE_UTILS + "LinearAttentionAndSlidingWindowAttentionLayer": LayerKind(
        _KEYS_VALUES,
        _LINEAR_STATES,
        fixed=("number_of_states", "sliding_window"),
        grows=(*_LINEAR_GROWS, "cumulative_length"),
    ),
    _MINIMAX_M3 + "MiniMaxM3VLSparseCacheLayer": LayerKind(_KEYS_VALUES | {"idx_keys": 0}),
    # The window of these two rolls back, the entries that were compressed out of it do not.
    _DEEPSEEK_V4 + "DeepseekV4HCACache": LayerKind(
        _KEYS_VALUES,
        _COMPRESSED_STATES,
        fixed=("sliding_window", "compress_rate"),
        grows=(*_WINDOW_GROWS, "entry_count"),
        rolls_back=False,
    ),
    _DEEPSEEK_V4 + "DeepseekV4CSACache": LayerKind(
        _KEYS_VALUES,
        (*_COMPRESSED_STATES, "overlap_kv", "overlap_gate"),
        fixed=("sliding_window", "compress_rate"),
        grows=(*_WINDOW_GROWS, "entry_count"),
        rolls_back=False,
    ),
}
"""Every class whose contents are known, by its full name: a subclass may hold more, so it is not taken for its parent."""


def class_name(value: object) -> str:
    """Full name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def kind_of(layer: object, index: int) -> LayerKind:
    """Return the kind of a cache layer.

    Raises:
        RunError: its class is not known.
    """
    name = class_name(layer)
    if name not in KINDS:
        known = ", ".join(sorted(known.rpartition(".")[2] for known in KINDS))
        raise RunError(
            f"cache layer {index} is a {name}, whose contents are not known; known are {known}. Use the cache that "
            "DynamicCache(config=model.config) makes, or generate one request at a time."
        )
    return KINDS[name]


def layer_tensors(layer: object, kind: LayerKind) -> dict[str, Tensor]:
    """Return the tensors a layer holds by name; those of a dict are named `attribute.key`."""
    named = {name: getattr(layer, name) for name in kind.tensors}
    for state in kind.states:
        named |= {f"{state}.{key}": tensor for key, tensor in getattr(layer, state).items()}
    # A layer that stored nothing yet may hold a tensor of no dimension to grow from.
    return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.dim() > 1}


def batch_dim(kind: LayerKind, name: str) -> int:
    """Return the batch dimension of a tensor that `layer_tensors` named."""
    return kind.tensors.get(name, 0)


def with_tensors(layer: object, kind: LayerKind, tensors: Mapping[str, Tensor]) -> Any:
    """Return a copy of `layer` that holds `tensors` instead of those of the same names; it shares no dict with the original."""
    result: Any = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(result, name, dict(value))
    for name, tensor in tensors.items():
        attribute, _, key = name.partition(".")
        if attribute in kind.states:
            states = getattr(result, attribute)
            states[next(known for known in states if str(known) == key)] = tensor
        else:
            setattr(result, attribute, tensor)
    return result


def plain_values(layer: object, kind: LayerKind) -> dict[str, Any]:
    """Return what a layer holds beside tensors as JSON values; dicts become lists of pairs."""
    values = {name: value for name, value in vars(layer).items() if name not in {*kind.tensors, *kind.states}}
    return {
        name: [list(pair) for pair in value.items()] if isinstance(value, dict) else value
        for name, value in values.items()
        if all(isinstance(one, int | None) for one in (value.values() if isinstance(value, dict) else [value]))
    }


def filled(layer: object, kind: LayerKind, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Any:
    """Return a copy of an empty `layer` that holds what `layer_tensors` and `plain_values` found in another of its class."""
    result = with_tensors(layer, kind, tensors)
    for name, value in values.items():
        setattr(result, name, dict(map(tuple, value)) if isinstance(value, list) else value)
    for tensor in tensors.values():
        # A layer notes the device when it first stores something.
        result.device = tensor.device
    return result
