"""What turns a stored row into logits: final norm, lm_head and embeddings, in a folder of their own.

The norm is kept as a module and not as a weight: models differ in what they do around it (upcasts, 1 + w, scales), and only the
model's own class does the same bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from .errors import RunError
from .sharded import address, whole

WEIGHTS_FILE = "head.safetensors"
DESCRIPTION_FILE = "head.json"
PARTS = ("norm", "lm_head", "embeddings")


class HeadError(RunError):
    """A head folder that cannot be written or read."""


@dataclass(frozen=True)
class Head:
    """The parts, each None where the model has none; on the CPU, in the dtype they were stored in.

    Attributes:
        norm: (..., H) pre-norm to post-norm, by the model's own class.
        lm_head: (..., H) post-norm to (..., V), without what some models do to logits afterwards (scaling, soft caps).
        embeddings: ids to (..., H).
    """

    norm: nn.Module | None
    lm_head: nn.Module | None
    embeddings: nn.Module | None


def head_parts(model: Any, norm_path: str | None) -> dict[str, tuple[str, nn.Module]]:
    """Part name -> (path in the model, module)."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = {
        "norm": model.get_submodule(norm_path) if norm_path else None,
        "lm_head": model.get_output_embeddings(),
        "embeddings": model.get_input_embeddings(),
    }
    return {name: (paths[id(module)], module) for name, module in found.items() if module is not None}


def save_head(
    folder: Path, model: Any, norm_path: str | None, *, trust_remote_code: bool = False, write: bool = True
) -> None:
    """Write the head of `model` and see that what can be loaded again computes the same bits.

    Where several processes hold the model in parts, all of them call this at once and one of them with `write`.

    Raises:
        HeadError: weights are offloaded, or the norm, loaded again, gives other values.
    """
    parts = head_parts(model, norm_path)
    tensors, tied = _whole_tensors(parts)
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).chmod(0o644)
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False), encoding="utf-8")
    description = {"paths": {name: path for name, (path, _) in parts.items()}, "tied": tied}
    if "norm" in parts:
        loaded = _loaded(folder, description, trust_remote_code=trust_remote_code)
        _require_same_norm(parts["norm"][1], loaded.norm)
    # Last and at once: a folder with a description is a whole head that was proven.
    unfinished = folder / f"{DESCRIPTION_FILE}.tmp"
    unfinished.write_text(json.dumps(description, sort_keys=True, indent=1), encoding="utf-8")
    unfinished.replace(folder / DESCRIPTION_FILE)


def _whole_tensors(parts: Mapping[str, tuple[str, nn.Module]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Part.key -> all of the tensor, and which of them are another one by another name."""
    tensors: dict[str, Tensor] = {}
    stored_at: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, (_, module) in parts.items():
        for key, value in _tensors_of(module).items():
            if value.device.type == "meta":
                raise HeadError(f"{name}.{key} is offloaded; load the model without offloading to write its head.")
            if address(value) in stored_at:
                tied[f"{name}.{key}"] = stored_at[address(value)]
                continue
            stored_at[address(value)] = f"{name}.{key}"
            tensors[f"{name}.{key}"] = whole(value).detach().cpu().contiguous()
    return tensors, tied


def load_head(folder: Path, *, trust_remote_code: bool = False) -> Head:
    """Read a head folder.

    Raises:
        HeadError: a file is missing, or the model class cannot be built from the config.
    """
    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadError(f"{folder} holds no head ({error}); capture with --head to write one.") from error
    return _loaded(folder, description, trust_remote_code=trust_remote_code)


def _loaded(folder: Path, description: Mapping[str, Any], *, trust_remote_code: bool) -> Head:
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, SafetensorError) as error:
        raise HeadError(f"{folder} holds no whole head ({error}); capture with --head to write one.") from error
    for name, source in description["tied"].items():
        tensors[name] = tensors[source]
    skeleton = _skeleton(config, trust_remote_code)
    return Head(**{name: _part(name, description["paths"], skeleton, tensors) for name in PARTS})


def _skeleton(config: Any, trust_remote_code: bool) -> nn.Module:
    auto: Any = AutoModelForCausalLM
    if type(config) not in auto._model_mapping and type(config) in AutoModelForImageTextToText._model_mapping:
        auto = AutoModelForImageTextToText
    with torch.device("meta"):
        return cast(nn.Module, auto.from_config(config, trust_remote_code=trust_remote_code))


def _part(name: str, paths: Mapping[str, str], skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module | None:
    if name not in paths:
        return None
    prefix = f"{name}."
    state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    module = skeleton.get_submodule(paths[name]).to_empty(device="cpu")
    # `assign` keeps each weight's stored dtype; the skeleton has the config's.
    persistent = module.state_dict().keys()
    module.load_state_dict({key: value for key, value in state.items() if key in persistent}, assign=True)
    for key in state.keys() - persistent:
        owner, _, buffer = key.rpartition(".")
        module.get_submodule(owner)._buffers[buffer] = state[key]
    return module.eval().requires_grad_(False)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those included that a state dict leaves out (Gemma's embedding scale is one)."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


@torch.no_grad()
def _require_same_norm(original: nn.Module, loaded: nn.Module | None) -> None:
    weight = next(original.parameters(), None)
    if weight is None or loaded is None:
        return
    # On one device: the same module sums in another order on another one.
    rows = torch.linspace(-3, 3, 4 * weight.shape[-1]).reshape(4, -1).to(weight.device, weight.dtype)
    if not torch.equal(original(rows), loaded.to(weight.device)(rows)):
        raise HeadError(
            f"the final norm {type(original).__name__} gives other values when it is built again from its weights; "
            "post-norm cannot be derived from this head. Capture with --final both instead."
        )
