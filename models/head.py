"""The head of a model in a folder of its own: final norm, lm_head and embeddings turn a stored row into logits.

The norm is kept as a module and not as a weight: models differ in what they do around it (upcasts, 1 + w, scales), and only the
model's own class does the same bit for bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from .checked_record import data_checksum, of_type, require_checksum, with_checksum
from .errors import RunError
from .modules import address, whole
from .remote_buffers import is_remote

WEIGHTS_FILE = "head.safetensors"
DESCRIPTION_FILE = "head.json"
CONFIG_FILE = "config.json"
_AGAIN = "the same capture with --head writes it again."
PARTS = ("norm", "lm_head", "embeddings")


class HeadError(RunError):
    """A head folder that cannot be written or read."""


@dataclass(frozen=True)
class Head:
    """The modules around the decoder layers, each None where the model has none; on the CPU, in the dtype they were stored in.

    Attributes:
        norm: the final norm, (..., H) to (..., H), by the model's own class.
        lm_head: (..., H) after the final norm to logits (..., V), without scaling or soft caps that some models add.
        embeddings: ids to (..., H).

    Example:
        >>> head, rows = load_head("OUT/head"), CapturedDataset("OUT")[0]["pre_norm"]
        >>> head.lm_head(head.norm(rows)).shape
        torch.Size([53, 259])
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
    config = _config_of(model).encode()
    for name in (DESCRIPTION_FILE, CONFIG_FILE):
        (folder / name).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_bytes(config)
    save_file(tensors, folder / WEIGHTS_FILE)
    # The library makes it readable for its owner alone; a file that is made as usual has the mode that the umask leaves.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode & 0o777)
    description = {
        "paths": {name: path for name, (path, _) in parts.items()},
        "tied": tied,
        "tensors_crc32": {name: _checksum(tensor) for name, tensor in tensors.items()},
        "config_crc32": data_checksum(config),
    }
    if "norm" in parts:
        loaded = _loaded(folder, description, trust_remote_code=trust_remote_code)
        _require_same_norm(parts["norm"][1], loaded.norm)
    # Last and at once: a folder with a description is a whole head that was proven.
    unfinished = folder / f"{DESCRIPTION_FILE}.tmp"
    unfinished.write_text(json.dumps(with_checksum(description), sort_keys=True, indent=1), encoding="utf-8")
    unfinished.replace(folder / DESCRIPTION_FILE)


def _config_of(model: Any) -> str:
    """Return the config as JSON; of transformers' own classes without a word of the code that came with the checkpoint."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    if not is_remote(model):
        fields.pop("auto_map", None)
    return json.dumps(fields, sort_keys=True, indent=2) + "\n"


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


def load_head(folder: str | Path, *, trust_remote_code: bool = False) -> Head:
    """Read a head folder, such as OUT/head; its tensors and config must match the checksums that were written with them.

    Args:
        folder: a folder that ``capture --head`` wrote.
        trust_remote_code: let code that comes with the model run.

    Raises:
        HeadError: a file is missing, changed on disk or cannot be read now, or the model class cannot be built from the config.

    Example:
        >>> load_head("OUT/head").lm_head
        Linear(in_features=32, out_features=259, bias=False)
    """
    folder = Path(folder)
    return _loaded(folder, _description(folder), trust_remote_code=trust_remote_code)


def load_head_config(folder: Path) -> dict[str, Any]:
    """Return the config of the model whose head `folder` holds; raises HeadError as `load_head` does."""
    config = _config_bytes(folder, _description(folder))
    try:
        return of_type(dict, json.loads(config))
    except (ValueError, TypeError, RecursionError) as error:  # one of an earlier release has no checksum
        raise HeadError(f"{folder / CONFIG_FILE} is damaged ({error}); {_AGAIN}") from error


def require_whole_head(folder: Path) -> None:
    """See that every file of a head folder is as it was written; raises HeadError as `load_head` does."""
    description = _description(folder)
    _config_bytes(folder, description)
    _read_tensors(folder, description)


def has_head(folder: Path) -> bool:
    """Return whether a head was written to `folder`; nothing is read."""
    return (folder / DESCRIPTION_FILE).is_file()


def head_bytes(model: Any, norm_path: str | None) -> int:
    """Return the bytes that the head of `model` fills on disk, tied tensors once."""
    tensors = {id(t): t for _, module in head_parts(model, norm_path).values() for t in _tensors_of(module).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION_FILE
    try:
        description = dict(json.loads(path.read_bytes()))
        require_checksum(description, ("paths", "tied"), ("tensors_crc32", "config_crc32"))
    except FileNotFoundError as error:
        raise HeadError(f"{folder} holds no head ({error}); capture with --head to write one.") from error
    except OSError as error:
        raise HeadError(f"{path}: cannot be read ({error.strerror}); run again once it can.") from error
    except (ValueError, TypeError) as error:
        raise HeadError(f"{path} is damaged ({error}); {_AGAIN}") from error
    return description


def _config_bytes(folder: Path, description: Mapping[str, Any]) -> bytes:
    path = folder / CONFIG_FILE
    try:
        config = path.read_bytes()
    except OSError as error:
        raise HeadError(f"{folder} holds no whole head ({error}); capture with --head to write one.") from error
    if description.get("config_crc32", data_checksum(config)) != data_checksum(config):
        raise HeadError(f"{path} does not match its checksum: it changed on disk; {_AGAIN}")
    return config


def _read_tensors(folder: Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise HeadError(f"{folder} holds no whole head ({error}); capture with --head to write one.") from error
    sums = description.get("tensors_crc32")  # heads of earlier releases have none
    if sums is None:
        return tensors
    changed = sorted(name for name in sums.keys() | tensors.keys() if sums.get(name) != _sum_of(tensors, name))
    if changed:
        raise HeadError(f"{path}: {', '.join(changed)} do not match their checksums: they changed on disk; {_AGAIN}")
    return tensors


def _sum_of(tensors: Mapping[str, Tensor], name: str) -> str | None:
    return _checksum(tensors[name]) if name in tensors else None


def _checksum(tensor: Tensor) -> str:
    # Shape and dtype too: a header changed on disk may cut the same bytes into another tensor.
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return f"{zlib.crc32(flat.numpy().data, zlib.crc32(kind)):08x}"


def _loaded(folder: Path, description: Mapping[str, Any], *, trust_remote_code: bool) -> Head:
    _config_bytes(folder, description)
    tensors = _read_tensors(folder, description)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        skeleton = _skeleton(config, trust_remote_code)
    except Exception as error:  # the class of a config may raise anything over its values
        raise HeadError(f"{folder} holds no whole head ({error}); capture with --head to write one.") from error
    try:
        for name, source in description["tied"].items():
            tensors[name] = tensors[source]
        return Head(**{name: _part(name, description["paths"], skeleton, tensors) for name in PARTS})
    except (
        AttributeError,
        LookupError,
        TypeError,
        RuntimeError,
    ) as error:  # a description of an earlier release has no checksum
        raise HeadError(
            f"{folder / DESCRIPTION_FILE} is damaged: it describes no head of {type(skeleton).__name__} ({error}); {_AGAIN}"
        ) from error


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
