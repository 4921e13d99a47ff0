"""A message between two processes: a JSON header and named tensors."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
