"""Tiny checkpoints in the forms in which large ones are published, and the plain weights that each of them means.

Layouts are written here by hand. A form takes a 2-dimensional weight and gives the tensors that stand for it in the file, by what
follows the module's name, and the float32 weight that they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Stored = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Stored, Tensor]]

FLOAT8_MAX = 448.0


@dataclass(frozen=True)
class Form:
    """quantize: what stands for one weight. config: of config.json. keeps: parts of the names of weights that stay plain."""

    quantize: Quantize
    config: Mapping[str, Any] | None
    keeps: tuple[str, ...] = ("embed", "lm_head", "norm", "mlp.gate.weight", "vision")
    files: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """folder: the checkpoint. plain: the same model with the weights that its file means, in the dtype of the model."""

    folder: Path
    plain: Path


def publish(
    folder: Path,
    model: nn.Module,
    form: Form,
    *,
    edit: Callable[[dict[str, Any]], None] | None = None,
    rename: Callable[[str], str] = str,
) -> Published:
    """Save `model` in `folder`/form, its matrices as `form` stores them, and in `folder`/plain, as they are meant.

    edit: changes the config of the published folder alone. rename: from transformers' names of stored weights to published ones.
    """
    published, plain = folder / "form", folder / "plain"
    for place in (published, plain):
        model.save_pretrained(place)
    stored = {rename(name): weight for name, weight in load_file(plain / "model.safetensors").items()}
    meant: Stored = {}
    tensors: Stored = {}
    for name, weight in stored.items():
        if weight.ndim != 2 or not name.endswith(".weight") or any(part in name for part in form.keeps):
            tensors[name] = meant[name] = weight
            continue
        parts, value = form.quantize(weight.float())
        tensors |= {f"{name.removesuffix('.weight')}.{key}": part.contiguous() for key, part in parts.items()}
        meant[name] = value.to(weight.dtype).contiguous()
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    config |= {"quantization_config": dict(form.config)} if form.config is not None else {}
    if edit is not None:
        edit(config)
    (published / "config.json").write_text(json.dumps(config))
    for name, content in form.files.items():
        (published / name).write_text(json.dumps(content))
    return Published(published, plain)


def float8_blocks(block: tuple[int, int] = (128, 128), scale_name: str = "weight_scale_inv") -> Quantize:
    """Float8 with one float32 scale a block, the last blocks as small as the matrix leaves them (DeepSeek-V3, Kimi K2)."""

    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, cols = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        scales, stored = torch.empty(rows, cols), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        meant = torch.empty(weight.shape)
        for r in range(rows):
            for c in range(cols):
                part = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
                scales[r, c] = weight[part].abs().max() / FLOAT8_MAX
                stored[part] = (weight[part] / scales[r, c]).to(torch.float8_e4m3fn)
                meant[part] = stored[part].float() * scales[r, c]
        return {"weight": stored, scale_name: scales}, meant

    return quantize


def float8_tensor(weight: Tensor) -> tuple[Stored, Tensor]:
    """Float8 with one scale a matrix beside a scale of the activations (Model-Optimizer's FP8)."""
    scale = weight.abs().max() / FLOAT8_MAX
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, stored.float() * scale


def float8_rows(weight: Tensor) -> tuple[Stored, Tensor]:
    """Float8 with one bfloat16 scale a row (compressed-tensors' FP8 of channels)."""
    scale = (weight.abs().amax(1, keepdim=True) / FLOAT8_MAX).bfloat16()
    stored = (weight / scale.float()).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def int8_rows(weight: Tensor) -> tuple[Stored, Tensor]:
    """Integers of 8 bits with one bfloat16 scale a row (compressed-tensors' W8A8)."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    stored = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def int4_packed(group: int = 32) -> Quantize:
    """Eight integers of 4 bits in each int32, a bfloat16 scale for each `group` columns (compressed-tensors' W4A16)."""

    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, cols = weight.shape
        grouped = weight.reshape(rows, cols // group, group)
        scale = (grouped.abs().amax(-1) / 7).bfloat16()
        values = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
        nibbles = (values.reshape(rows, cols).long() + 8).reshape(rows, cols // 8, 8)
        packed = (nibbles << torch.arange(0, 32, 4)).sum(-1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        meant = (values * scale.float()[..., None]).reshape(rows, cols)
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([rows, cols])}, meant

    return quantize


def fp8_config(block: tuple[int, int] | None = (128, 128)) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
    }  # fmt: skip


def compressed_config(
    form: str,
    weights: Mapping[str, Any],
    *,
    activations: Mapping[str, Any] | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
) -> dict[str, Any]:
    """What compressed-tensors' own writer leaves in config.json."""
    whole = {"dynamic": False, "symmetric": True, "block_structure": None, "group_size": None, "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": {**whole, "observer": "minmax", **weights},
        "input_activations": None if activations is None else {**whole, "observer": None, **activations},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": list(ignore),
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip


def as_k25_is_published(name: str) -> str:
    """Kimi K2.5's text layers; transformers' own writer calls them blocks, as those of the vision tower."""
    return name.replace("language_model.model.blocks.", "language_model.model.layers.")


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def nvfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    """Two floats of 4 bits a byte, a float8 scale for each 16 columns, one divisor for all (compressed-tensors' NVFP4A16)."""
    whole = torch.tensor([FLOAT8_MAX * 6 / weight.abs().max().item()])
    grouped = weight.reshape(len(weight), -1, 16)
    scale = (grouped.abs().amax(-1) / 6 * whole).clamp(max=FLOAT8_MAX).to(torch.float8_e4m3fn)
    packed, meant = _four_bit_floats(grouped, scale.float() / whole)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}, meant


def mxfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    """Two floats of 4 bits a byte, a power of two for each 32 columns (compressed-tensors' MXFP4)."""
    grouped = weight.reshape(len(weight), -1, 32)
    exponent = (grouped.abs().amax(-1) / 6).log2().ceil()
    packed, meant = _four_bit_floats(grouped, exponent.exp2())
    return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}, meant


def _four_bit_floats(grouped: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    codes = (grouped[..., None] / scale[..., None, None] - _E2M1).abs().argmin(-1)
    flat = codes.flatten(1)
    return (flat[:, ::2] | (flat[:, 1::2] << 4)).to(torch.uint8), (_E2M1[codes] * scale[..., None]).flatten(1)


def publish_fused_mxfp4(folder: Path, model: nn.Module) -> Published:
    """Save gpt-oss as it is published: experts (E, rows, columns) in MXFP4, blocks of 16 bytes beside their exponents."""
    published, plain = folder / "form", folder / "plain"
    for place in (published, plain):
        model.save_pretrained(place)
    tensors: Stored = {}
    meant: Stored = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = meant[name] = weight
            continue
        E, columns, rows = weight.shape  # transformers holds the transpose
        parts, values = mxfp4(weight.float().mT.reshape(E * rows, columns))
        groups = columns // 32
        tensors[f"{name}_blocks"] = parts["weight_packed"].reshape(E, rows, groups, 16).contiguous()
        tensors[f"{name}_scales"] = parts["weight_scale"].reshape(E, rows, groups).contiguous()
        meant[name] = values.reshape(E, rows, columns).mT.to(weight.dtype).contiguous()
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    keeps = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": keeps}
    (published / "config.json").write_text(json.dumps(config))
    return Published(published, plain)
