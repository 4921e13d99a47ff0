"""A check that a model fits in memory, before its weights are read: the kernel would end the process without a word."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .checkpoint import CheckpointError
from .decoder import DecoderNotFoundError, find_decoder
from .memory import accelerator_bytes, available_bytes
from .published_form import PublishedForm
from .safetensors_dtypes import DTYPE_NAMES
from .stored_tensors import place
from .streaming import StreamedNeeds

# Most values that one stored element of an integer type holds.
_PACKED = {"U8": 2, "I8": 2, "I32": 8, "U32": 8}


class ModelTooLargeError(CheckpointError):
    """A model that does not fit into the memory that is free.

    Attributes:
        sizes: what it needs and what is free, in words.
    """

    def __init__(self, message: str, sizes: str) -> None:
        super().__init__(message)
        self.sizes = sizes


def require_room(
    form: PublishedForm,
    skeleton: Callable[[], nn.Module],
    dtype: torch.dtype,
    device: torch.device | None,
    name: str,
    *,
    in_float32: bool = False,
) -> None:
    """Refuse a model whose weights do not fit.

    Weights that are computed with as they are stored are mapped from their files and take no memory of a CPU's; those that
    loading converts (dequantized, fused experts, another dtype) do.

    Args:
        device: the one that the model is loaded onto; None spreads it over all accelerators and the CPU.
        skeleton: makes the model on the meta device; called only where the stored bytes leave it open.
        in_float32: the same weights will take the place of the loaded ones in float32, which none is mapped in.

    Raises:
        ModelTooLargeError: with what it needs and what is free.
    """
    if not form.tensors:
        return
    host = available_bytes(torch.device("cpu"))
    spread = accelerator_bytes() if device is None else 0
    free = host if device is None or device.type == "cpu" else min(host, available_bytes(device))
    itemsize = torch.float32.itemsize if in_float32 else dtype.itemsize
    if _at_most(form) * itemsize <= free:
        return
    model = skeleton()
    every_weight = sum(p.numel() for p in model.parameters()) * itemsize
    on_host = _converted(model, form, dtype)
    if in_float32 and (device is None or device.type == "cpu"):
        on_host = every_weight
    needs = [(on_host - spread, host, torch.device("cpu"))]
    if device is not None and device.type != "cpu":
        needs.append((every_weight, available_bytes(device), device))
    for need, room, where in needs:
        if need > room:
            sizes = f"{_gb(need)} of memory on {where}{' in float32' if in_float32 else ''}, and {_gb(room)} is free"
            raise ModelTooLargeError(
                f"{name} ({form}, {_gb(form.bytes_on_disk)} on disk) needs {sizes}, a container's limit included. Capture with "
                f"--stream-weights, which holds two layers at a time{_streamed(model, form, dtype)}; or spread the model over "
                "accelerators (--device-map auto).",
                f"it needs {sizes}",
            )


def _streamed(model: nn.Module, form: PublishedForm, dtype: torch.dtype) -> str:
    """Return what streamed weights would take, in words; nothing where the layers are not found without weights."""
    try:
        decoder = find_decoder(model)
    except DecoderNotFoundError:
        return ""
    needs = StreamedNeeds.of_skeleton(decoder, form.tensors.values(), dtype.itemsize)
    return (
        f" ({_gb(needs.memory)} with what is outside the layers, and the states of a block) and reads up to "
        f"{_gb(sum(needs.layers_on_disk))} for each block"
    )


def _at_most(form: PublishedForm) -> int:
    """Return an upper bound of the number of weights."""
    return sum(torch.Size(t.shape).numel() * _PACKED.get(t.dtype, 1) for t in form.tensors.values())


def _converted(model: nn.Module, form: PublishedForm, dtype: torch.dtype) -> int:
    """Return the bytes of parameters that loading converts from what the files hold."""
    mapped = {(place(t.name), t.shape) for t in form.tensors.values() if t.dtype == DTYPE_NAMES.get(dtype)}
    left = (p for name, p in model.named_parameters() if (place(name), tuple(p.shape)) not in mapped)
    return sum(p.numel() for p in left) * dtype.itemsize


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
