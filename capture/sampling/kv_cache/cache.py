"""Rows of a key-value cache: taken, put together, and positions taken off its end.

A cache here is what `DynamicCache(config=model.config)` makes. Nothing is padded: caches that are put together have seen
the same number of positions. Every function returns a new cache and leaves the one it was given as it was; tensors that
need no change are shared.
"""

import copy
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ....models.errors import RunError, UsageError
from .layers import LayerKind, batch_dim, class_name, kind_of, layer_tensors, with_tensors

_Layers: TypeAlias = list[tuple[object, LayerKind]]


def select(cache: Cache, rows: Sequence[int]) -> Cache:
    """Return the cache of some requests of the batch: row i of the result is row `rows[i]` of `cache`.

    Raises:
        UsageError: there is no such row.
        RunError: a layer of a class whose contents are not known.
    """
    layers = known_layers(cache)
    size = batch_size(cache)
    if not all(0 <= row < size for row in rows):
        raise UsageError(f"rows must be in 0..{size - 1}, those of the cache; found {list(rows)}.")
    return with_layers(cache, [_selected(layer, kind, rows) for layer, kind in layers])


def merge(caches: Sequence[Cache]) -> Cache:
    """Return one cache for the requests of several, in order; all must hold the same number of positions.

    Raises:
        UsageError: no cache, or caches that differ in their layers or in the positions they have seen.
        RunError: a layer of a class whose contents are not known.
    """
    if not caches:
        raise UsageError("at least one cache is needed to merge; found none.")
    columns = [known_layers(cache) for cache in caches]
    if len({len(layers) for layers in columns}) > 1:
        raise UsageError(f"caches to merge need the same layers; found {[len(layers) for layers in columns]} layers.")
    merged = [_merged(index, list(layers)) for index, layers in enumerate(zip(*columns, strict=True))]
    return with_layers(caches[0], merged)


def crop(cache: Cache, count: int) -> Cache:
    """Drop the last `count` positions of the cache, and records that neither a crop nor its next step needs.

    Raises:
        UsageError: `count` is negative or more than the cache has.
        RunError: a layer that cannot go back: it keeps a recurrent state, or it has dropped what would be visible again.
    """
    layers = known_layers(cache)
    if count < 0:
        raise UsageError(f"the number of positions to take off must not be negative; found {count}.")
    if count == 0:
        records = any(getattr(layer, "record_past", False) for layer, _ in layers)
        return with_layers(cache, [_cropped(layer, kind, 0) for layer, kind in layers]) if records else cache
    for index, (layer, kind) in enumerate(layers):
        _check_goes_back(index, layer, kind, count)
    _check_convolutions_recorded(layers, count)
    return with_layers(cache, [_cropped(layer, kind, count) for layer, kind in layers])


def batch_size(cache: Cache) -> int:
    """Return how many requests a cache holds; 0 for one that nothing was stored in."""
    for layer, kind in known_layers(cache):
        for name, tensor in layer_tensors(layer, kind).items():
            return tensor.shape[batch_dim(kind, name)]
    return 0


def known_layers(cache: Cache) -> _Layers:
    """Return the layers of a cache, each with its kind.

    Raises:
        RunError: a cache or a layer of a class whose contents are not known.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        offloading = " with offloading" if getattr(cache, "offloading", False) else ""
        raise RunError(
            f"the cache is a {class_name(cache)}{offloading}; only what DynamicCache(config=model.config) makes can be "
            "taken apart. Generate one request at a time with this model."
        )
    return [(layer, kind_of(layer, index)) for index, layer in enumerate(cache.layers)]


def with_layers(cache: Cache, layers: list[object]) -> Cache:
    """Return a copy of `cache` with other layers."""
    result = copy.copy(cache)
    result.layers = layers
    return result


def _cropped(layer: object, kind: LayerKind, count: int) -> object:
    result = with_tensors(layer, kind, {})
    if layer_tensors(layer, kind):
        result.crop(-count)
    return result


def _selected(layer: object, kind: LayerKind, rows: Sequence[int]) -> object:
    chosen = {}
    for name, tensor in layer_tensors(layer, kind).items():
        index = torch.tensor(rows, dtype=torch.int64, device=tensor.device)
        chosen[name] = tensor.index_select(batch_dim(kind, name), index)
    return with_tensors(layer, kind, chosen)


def _merged(index: int, layers: _Layers) -> object:
    first, kind = layers[0]
    _check_alike(index, layers)
    columns = [layer_tensors(layer, kind) for layer, _ in layers]
    joined = {name: torch.cat([column[name] for column in columns], dim=batch_dim(kind, name)) for name in columns[0]}
    return with_tensors(first, kind, joined)


def _check_alike(index: int, layers: _Layers) -> None:
    """Refuse to merge layers that differ in anything but the batch."""
    descriptions = [_description(layer, kind) for layer, kind in layers]
    for other in descriptions[1:]:
        for name in descriptions[0] | other:
            expected, found = descriptions[0].get(name), other.get(name)
            if expected != found:
                raise UsageError(
                    f"caches to merge must be alike and have seen the same number of positions: {name} of layer {index} "
                    f"is {expected} in the first and {found} in another."
                )


def _description(layer: object, kind: LayerKind) -> dict[str, object]:
    """Return all that two layers of one batch share: class, shapes without the batch, and what they count."""
    shapes = {
        name: (tensor.dtype, _without(tensor, batch_dim(kind, name)))
        for name, tensor in layer_tensors(layer, kind).items()
    }
    plain = {name: getattr(layer, name) for name in (*kind.fixed, *kind.grows)}
    return {"class": class_name(layer), **plain, **shapes}


def _without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _check_goes_back(index: int, layer: object, kind: LayerKind, count: int) -> None:
    tensors = layer_tensors(layer, kind)
    name = type(layer).__name__
    if not kind.rolls_back or any(state.startswith("recurrent_states") for state in tensors):
        raise RunError(
            f"layer {index} of the cache, a {name}, keeps a running state that cannot go back {count} positions; "
            "keep a cache from before the step instead."
        )
    if "keys" in tensors:
        _check_keys_suffice(index, layer, tensors["keys"].shape[-2], count)


def _check_keys_suffice(index: int, layer: object, stored: int, count: int) -> None:
    seen = getattr(layer, "cumulative_length", stored)
    if count > seen:
        raise UsageError(f"layer {index} of the cache has seen {seen} positions; {count} cannot be taken off.")
    window = getattr(layer, "sliding_window", None)
    if window is not None and stored - count < min(window - 1, seen - count):
        raise RunError(_not_recorded(index, type(layer).__name__, count))


def _check_convolutions_recorded(layers: _Layers, count: int) -> None:
    lengths = [tensors["keys"].shape[-2] for tensors in (layer_tensors(*pair) for pair in layers) if "keys" in tensors]
    for index, (layer, kind) in enumerate(layers):
        for name, tensor in layer_tensors(layer, kind).items():
            state, _, key = name.partition(".")
            if state != "conv_states":
                continue
            width = next(size for known, size in vars(layer)["conv_kernel_size"].items() if str(known) == key)
            # A state that recorded from the start is as short as the sequence.
            needed = min([width, *(length - count for length in lengths)])
            if not vars(layer)["record_past"] or tensor.shape[-1] - count < needed:
                raise RunError(_not_recorded(index, type(layer).__name__, count))


def _not_recorded(index: int, name: str, count: int) -> str:
    return (
        f"layer {index} of the cache, a {name}, has dropped positions that would be visible again {count} positions "
        "earlier; call activate_past_recording() on the cache before the step."
    )
