"""The value of a quantized weight, computed from its stored tensors: a second opinion on the quantizer that loaded it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .stored_tensors import StoredTensor

_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Stored = Mapping[str, StoredTensor]


def quantized_modules(tensors: Stored) -> tuple[str, ...]:
    """Return the modules whose weight `dequantized` can read, in the order of the files."""
    found = []
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last == "weight_packed" or (last == "weight" and _scale(tensors, module) is not None):
            found.append(module)
    return tuple(found)


def dequantized(tensors: Stored, module: str, fields: Mapping[str, Any]) -> Tensor | None:
    """Return the (rows, columns) float32 weight of `module`; None for a layout that is not known here.

    fields: the config's quantization_config.
    """
    part = {name: tensors[f"{module}.{name}"].read() for name in _parts_of(tensors, module)}
    if "weight_packed" in part:
        return _packed(part, fields)
    scale_name = _scale(tensors, module)
    weight = part["weight"]
    if scale_name is None or weight.ndim != 2:
        return None
    if weight.dtype == torch.int8 and scale_name != "weight_scale":  # two floats of 4 bits a byte
        weight = _from_e2m1(weight.view(torch.uint8))
    values = weight.float() - (part["weight_zero_point"].float() if "weight_zero_point" in part else 0.0)
    block = fields.get("weight_block_size")
    scale = _spread(_exponents(part[scale_name]), values, tuple(block) if block else None)
    return None if scale is None else values * scale


def _packed(part: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Tensor | None:
    packed, scale = part["weight_packed"], part["weight_scale"]
    if packed.dtype == torch.uint8:
        values, scale = _from_e2m1(packed), _exponents(scale)
        if "weight_global_scale" in part:
            scale = scale / part["weight_global_scale"].float()
    elif "weight_shape" in part and "weight_g_idx" not in part:
        rows, cols = (int(size) for size in part["weight_shape"])
        bits = _bits(scale, cols, packed, fields)
        if bits is None:
            return None
        values = _unpacked(packed, bits, cols)
        if "weight_zero_point" in part:
            zeros = _unpacked(part["weight_zero_point"].T.contiguous(), bits, rows).T
            values = values - _spread(zeros, values, None)  # type: ignore[operator]
    else:
        return None
    spread = _spread(scale.float(), values, None)
    return None if spread is None else values * spread


def _bits(scale: Tensor, cols: int, packed: Tensor, fields: Mapping[str, Any]) -> int | None:
    """Bits of a value: those of the config's groups that fill the packed integers and give these scales."""
    for group in (fields.get("config_groups") or {}).values():
        weights = group["weights"] or {}
        bits, size = weights.get("num_bits"), max(weights.get("group_size") or 0, 0) or cols
        if bits and 32 % bits == 0 and -(-cols * bits // 32) == packed.shape[1] and cols // size == scale.shape[-1]:
            return int(bits)
    return None


def _unpacked(packed: Tensor, bits: int, cols: int) -> Tensor:
    """Return (rows, cols) signed values from int32 that hold 32 // bits of them each, the lowest bits first."""
    places = torch.arange(0, 32, bits)
    values: Tensor = (packed.long()[..., None] >> places) & (2**bits - 1)
    return values.flatten(1)[:, :cols].float().sub(2 ** (bits - 1))


def _from_e2m1(packed: Tensor) -> Tensor:
    """Return (rows, 2 * columns) float32 of two E2M1 floats a byte, the low four bits first."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(1)


def _exponents(scale: Tensor) -> Tensor:
    """float32 scales; bytes are exponents of 2 with a bias of 127."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


def _spread(scale: Tensor, values: Tensor, block: tuple[int, int] | None) -> Tensor | None:
    """Repeat the scales (one for all, one a row, or one a block or group) to the shape of `values`; None for other shapes."""
    rows, cols = values.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    grid = scale[:, None] if scale.ndim == 1 else scale
    if grid.ndim != 2:
        return None
    if block is None or tuple(grid.shape) != (-(-rows // block[0]), -(-cols // block[1])):
        if rows % grid.shape[0] or cols % grid.shape[1]:
            return None
        block = rows // grid.shape[0], cols // grid.shape[1]
    return grid.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def _scale(tensors: Stored, module: str) -> str | None:
    return next((name for name in _SCALES if f"{module}.{name}" in tensors), None)


def _parts_of(tensors: Stored, module: str) -> list[str]:
    names = (
        "weight",
        "weight_packed",
        "weight_shape",
        "weight_zero_point",
        "weight_global_scale",
        "weight_g_idx",
        *_SCALES,
    )
    return [name for name in names if f"{module}.{name}" in tensors]
