"""The form in which a checkpoint is published: how its weights are quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError
from .config import text_config
from .stored_tensors import StoredTensor, stored_tensors

# What stands beside a quantized weight, by the last part of its name.
OF_WEIGHTS = re.compile(
    r"((^|\.)(weight_(scale|scale_inv|scale_2|zero_point|global_scale|packed)|qscale_weight|qweight|qzeros|scales|g_idx"
    r"|absmax|SCB)|[._](zero_point|scale_inv)|_blocks|\.quant_state\..*)$"
)
OF_ACTIVATIONS = re.compile(
    r"(^|\.)((input|activation|output)_(scale|zero_point|global_scale)|qscale_act|[qkv]_scale)$"
)

# What headers say of weights that loading turned into plain ones.
DEQUANTIZED = "dequantized"


class PublishedFormError(CheckpointError):
    """A checkpoint in a form that nothing here would read rightly."""


@dataclass(frozen=True)
class PublishedForm:
    """The form of a checkpoint's weights.

    Attributes:
        method: how they are quantized in transformers' words, None where the config says nothing of it.
        fields: the config's quantization_config; {} without one.
        model_optimizer: what hf_quant_config.json names, None without that file.
        tensors: the stored tensors by name; {} where the files are not here.
    """

    method: str | None
    fields: Mapping[str, Any]
    model_optimizer: str | None
    tensors: Mapping[str, StoredTensor]

    @property
    def is_quantized(self) -> bool:
        return self.method is not None

    @property
    def quantized(self) -> tuple[StoredTensor, ...]:
        """Return the tensors that mean something only to a quantizer: narrow weights, their scales and zero points."""
        return tuple(t for t in self.tensors.values() if _needs_quantizer(t))

    @property
    def files(self) -> frozenset[Path]:
        return frozenset(tensor.file for tensor in self.tensors.values())

    @property
    def bytes_on_disk(self) -> int:
        """Size of the weight files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, where the config names blocks."""
        size = self.fields.get("weight_block_size")
        if size is None:
            return None
        if not isinstance(size, list | tuple) or [type(one) for one in size] != [int, int] or min(size) < 1:
            raise PublishedFormError(
                f"quantization_config.weight_block_size of its config.json is {size!r}; expected two numbers of rows and "
                "columns. Fetch the model again."
            )
        return size[0], size[1]

    @property
    def rounds_activations(self) -> bool:
        """Return whether its own arithmetic rounds activations too, beside the weights."""
        if self.method in ("fp8", "mxfp8", "fbgemm_fp8"):
            return True
        return any(group.get("input_activations") for group in self._groups)

    @property
    def is_dequantized(self) -> bool:
        """Return whether its weights can be dequantized while they are loaded; mixed schemes of dense layers cannot."""
        if self.method in ("fp8", "mxfp8"):
            return True
        if self.method != "compressed-tensors":
            return False
        dense = [group for group in self._groups if not any("experts" in str(target) for target in group["targets"])]
        return all(
            (group["weights"], group.get("format")) == (dense[0]["weights"], dense[0].get("format")) for group in dense
        )

    @property
    def _groups(self) -> list[Mapping[str, Any]]:
        """Return the groups of compressed-tensors; raises PublishedFormError where they are not what that format has."""
        groups = self.fields.get("config_groups") or {}
        found = list(groups.values()) if isinstance(groups, Mapping) else [groups]
        for group in found:
            if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list) or "weights" not in group:
                raise PublishedFormError(
                    "quantization_config.config_groups of its config.json is damaged: expected groups with targets and weights, "
                    f"found {str(group)[:80]!r}. Fetch the model again."
                )
        return found

    def as_json(self, *, kept: bool) -> dict[str, Any]:
        """Return the form as JSON values for the shard header; `kept`: weights were not dequantized on purpose."""
        dequantized = self.is_dequantized and not kept
        rounded = self.rounds_activations and not dequantized
        return {
            "method": self.method,
            "weights": DEQUANTIZED if dequantized else "as the quantizer computes them",
            "activations": "rounded as the checkpoint says" if rounded else "not rounded",
        }

    def __str__(self) -> str:
        if self.method is None:
            return f"unquantized, {self._dtypes()}"
        blocks = [f"blocks of {self.block_size[0]} x {self.block_size[1]}"] if self.block_size else []
        details = [str(self.fields[name]) for name in ("format", "fmt", "quant_type", "bits") if self.fields.get(name)]
        inside = ", ".join([*details, *blocks])
        return f"{self.method}{f' ({inside})' if inside else ''}, {self._dtypes()}"

    def _dtypes(self) -> str:
        names = sorted({tensor.dtype for tensor in self.tensors.values()})
        return ", ".join(names) if names else "weights not here"


def published_form(folder: Path, config: Any) -> PublishedForm:
    """Read the form of the checkpoint in `folder` from its config and the headers of its weight files.

    Raises:
        CheckpointError: a weight file does not open.
    """
    fields = declared_quantization(config)
    return PublishedForm(_method(fields), fields, _model_optimizer(folder), stored_tensors(folder))


def declared_quantization(config: Any) -> dict[str, Any]:
    """Return what a model's config says of quantization, {} where it says nothing."""
    for part in (config, text_config(config)):
        for name in ("quantization_config", "compression_config", "quantization"):
            found = getattr(part, name, None)
            if isinstance(found, Mapping):
                return dict(found)
            if found is not None and hasattr(found, "to_dict"):
                return dict(found.to_dict())
            if found:
                raise PublishedFormError(
                    f"{name} of its config.json is {found!r}; expected an object that says how weights are quantized. Fetch the "
                    "model again."
                )
    return {}


def is_companion(name: str) -> bool:
    """Return whether a stored tensor of that name is a scale or zero point, of weights or of activations."""
    return bool(OF_WEIGHTS.search(name) or OF_ACTIVATIONS.search(name))


def _needs_quantizer(tensor: StoredTensor) -> bool:
    integer = tensor.is_integer and len(tensor.shape) > 1 and tensor.name.endswith(("weight", "_proj"))
    return tensor.is_narrow_float or integer or is_companion(tensor.name)


def _method(fields: Mapping[str, Any]) -> str | None:
    """transformers' name of the method, else the config's own."""
    if not fields:
        return None
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return f"bitsandbytes_{4 if fields.get('load_in_4bit') else 8}bit"
    stated = fields.get("quant_method")
    if stated is not None:
        return str(getattr(stated, "value", stated))
    return "mlx" if {"group_size", "bits"} <= fields.keys() else "a method without a name"


def _model_optimizer(folder: Path) -> str | None:
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return None
    found = re.search(r'"quant_algo"\s*:\s*"([^"]+)"', path.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else "no quant_algo"
