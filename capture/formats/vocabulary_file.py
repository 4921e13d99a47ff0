"""A draft vocabulary that a draft model was made with: d2t and t2d as EAGLE-3, SpecForge, AngelSlim and speculators store them.

V: target vocabulary, D: draft vocabulary.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .containers import load_container
from .errors import LayoutError
from .vocabulary import DraftVocabulary

NAMES = ("d2t", "t2d")
_EXPECTED = (
    "expected d2t, and t2d where there is one, in a .safetensors, .npz, .pt, .pth, .bin or .ckpt file, or d2t.npy"
)


def read_vocabulary(path: Path, V: int | None) -> DraftVocabulary:
    """Return the draft vocabulary in `path`, in the order of the draft ids.

    d2t: (D,) integers, what to add to a draft id to get the target's. t2d: (V,) bool, which target tokens have a draft id.

    Args:
        path: a checkpoint or a mapping; of `d2t.npy`, t2d is read from `t2d.npy` in the same folder.
        V: the target's tokens; None takes the length of t2d.

    Raises:
        LayoutError: the file cannot be read or has no d2t, an id lies outside the vocabulary, two draft ids name one token, or
            t2d has another length or other tokens than d2t.
    """
    found = _tensors(path)
    d2t, t2d = found.get("d2t"), found.get("t2d")
    if d2t is None:
        raise LayoutError(f"{path} holds no d2t; {_EXPECTED}.")
    _require_integers(d2t, path)
    V = _size(t2d, V, path)
    token_ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    _require_injective(token_ids, d2t, V, path)
    vocabulary = DraftVocabulary(token_ids, V)
    if t2d is not None and not torch.equal(t2d.to(torch.bool), vocabulary.t2d):
        other = int((t2d.to(torch.bool) != vocabulary.t2d).nonzero()[0, 0])
        has, names = ("has", "does not name") if t2d[other] else ("lacks", "names")
        raise LayoutError(f"{path}: t2d {has} target token {other}, which d2t {names}; they are of different mappings.")
    return vocabulary


def _size(t2d: Tensor | None, V: int | None, path: Path) -> int:
    if t2d is None:
        if V is None:
            raise LayoutError(
                f"{path} holds no t2d, so it does not say how many tokens the target has: give --target-vocab-size, or a head "
                "(--head DIR)."
            )
        return V
    is_mask = t2d.ndim == 1 and not t2d.is_floating_point() and bool(((t2d == 0) | (t2d == 1)).all())
    if not is_mask:
        raise LayoutError(
            f"{path}: expected t2d as (V,) bool, 1 where a target token has a draft id; found {_form(t2d)}."
        )
    if V is not None and len(t2d) != V:
        raise LayoutError(
            f"{path}: t2d is of a target of {len(t2d)} tokens, and this one has {V}; is the draft model another target's?"
        )
    return len(t2d)


def _require_integers(d2t: Tensor, path: Path) -> None:
    if d2t.ndim != 1 or not len(d2t) or d2t.is_floating_point() or d2t.dtype is torch.bool:
        raise LayoutError(f"{path}: expected d2t as (D,) integers, what to add to each draft id; found {_form(d2t)}.")


def _require_injective(token_ids: Tensor, d2t: Tensor, V: int, path: Path) -> None:
    outside = ((token_ids < 0) | (token_ids >= V)).nonzero()[:, 0]
    if len(outside):
        draft_id = int(outside[0])
        ids_instead = len(d2t) == len(set(d2t.tolist())) and int(d2t.min()) >= 0 and int(d2t.max()) < V
        why = " Does d2t hold target ids instead of offsets?" if ids_instead else ""
        raise LayoutError(
            f"{path}: draft id {draft_id} is target token {int(token_ids[draft_id])} by its d2t of {int(d2t[draft_id])}; "
            f"expected 0..{V - 1}.{why}"
        )
    order = token_ids.argsort(stable=True)
    twice = (token_ids[order].diff() == 0).nonzero()[:, 0]
    if len(twice):
        one, other = (int(order[place]) for place in (int(twice[0]), int(twice[0]) + 1))
        raise LayoutError(
            f"{path}: draft ids {one} and {other} are both target token {int(token_ids[one])}; expected another for each."
        )


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise LayoutError(f"{path} is no file; {_EXPECTED}.")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in NAMES if name in file.keys()}  # noqa: SIM118
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _as_tensors({name: arrays[name] for name in NAMES if name in arrays})
        if path.suffix == ".npy":
            files = {name: path.with_name(f"{name}.npy") for name in NAMES}
            return _as_tensors({n: np.load(f, allow_pickle=False) for n, f in files.items() if f.is_file()})
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile) as error:
        raise LayoutError(f"{path} cannot be read: {error}") from error
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise LayoutError(f"{path} is of no known kind; {_EXPECTED}.")
    return _as_tensors(load_container(path))


def _as_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(values[name]) for name in NAMES if name in values}


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
