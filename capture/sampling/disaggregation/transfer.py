"""A request on its way from a prefill process to a decode process: its first token and its key-value cache."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import Cache

from ....models.errors import HiddentapError, RunError
from ..kv_cache.cache import known_layers, with_layers
from ..kv_cache.layers import class_name, filled, layer_tensors, plain_values
from .handoff import FirstToken, MetadataBuffers


def send_request(buffers: MetadataBuffers, slot: int, cache: Cache, destination: int) -> None:
    """Send the first token in a slot, and the request's cache, to the rank that decodes.

    Raises:
        HiddentapError: the slot cannot be read, or the cache cannot be taken apart; the other side is told.
    """
    try:
        first = buffers.get_buf(slot, wants_sampling_mask=buffers.max_sampling_mask_tokens > 0)
        first = replace(first, wants_sampling_mask=first.sampling_mask is not None)
        layers = known_layers(cache)
    except HiddentapError as error:
        send_message({"error": str(error)}, {}, destination)
        raise
    described = [{"class": class_name(layer), "values": plain_values(layer, kind)} for layer, kind in layers]
    tensors = {
        f"{index}.{name}": tensor
        for index, (layer, kind) in enumerate(layers)
        for name, tensor in layer_tensors(layer, kind).items()
    }
    send_message({"first": asdict(first), "layers": described}, tensors, destination)


def receive_request(
    buffers: MetadataBuffers, slot: int, empty: Cache, source: int, device: torch.device | str = "cpu"
) -> Cache:
    """Put the first token that a prefill rank sent into a slot, and return the request's cache, on `device`.

    empty: a cache that nothing was stored in, made from this side's model.

    Raises:
        RunError: the other side could not send, its cache is not one of this side's model, or the token's mask or top
            log-probabilities do not fit; the slot holds no token then.
    """
    header, tensors = receive_message(source)
    buffers.clear_buf(slot)
    if "error" in header:
        raise RunError(f"the prefill process could not hand the request over: {header['error']}")
    cache = _filled_cache(empty, header["layers"], {name: tensor.to(device) for name, tensor in tensors.items()})
    buffers.set_buf(slot, FirstToken(**header["first"]))
    return cache


def _filled_cache(empty: Cache, described: list[dict[str, Any]], tensors: dict[str, Tensor]) -> Cache:
    layers = known_layers(empty)
    expected, found = [class_name(layer) for layer, _ in layers], [layer["class"] for layer in described]
    if expected != found:
        raise RunError(f"the cache sent is of another model: expected layers {expected}, found {found}.")
    for index, ((layer, kind), description) in enumerate(zip(layers, described, strict=True)):
        for name in kind.fixed:
            if getattr(layer, name) != description["values"][name]:
                raise RunError(
                    f"the cache sent is of another model: {name} of layer {index} is {description['values'][name]}, "
                    f"expected {getattr(layer, name)}."
                )
    contents = [
        filled(layer, kind, _of_layer(index, tensors), description["values"])
        for index, ((layer, kind), description) in enumerate(zip(layers, described, strict=True))
    ]
    return with_layers(empty, contents)


def _of_layer(index: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def send_message(header: Mapping[str, Any], tensors: Mapping[str, Tensor], destination: int) -> None:
    """Send `header` (anything JSON can hold) and `tensors` to a rank; through the host, by a group that sends CPU tensors."""
    described = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
    ]
    text = json.dumps({"header": dict(header), "tensors": described}).encode()
    dist.send(torch.tensor([len(text)], dtype=torch.int64), destination)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), destination)
    for tensor in tensors.values():
        if tensor.numel():
            dist.send(_as_bytes(tensor.detach().cpu().contiguous()), destination)


def receive_message(source: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Receive what `send_message` sent from a rank: the header, and the tensors on the CPU."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    text = torch.zeros(int(length), dtype=torch.uint8)
    dist.recv(text, source)
    message = json.loads(bytes(text.tolist()))
    tensors = {}
    for name, dtype, shape in message["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            dist.recv(_as_bytes(tensor), source)
        tensors[name] = tensor
    return message["header"], tensors


def _as_bytes(tensor: Tensor) -> Tensor:
    # Not every backend sends every dtype; all send bytes.
    return tensor.reshape(-1).view(torch.uint8)
