"""Lengths at which a model changes the values of all its rows at once, found without running it at such lengths.

Some rotary embeddings choose their frequencies by the largest position of a call (longrope: two sets of frequencies; dynamic
NTK: other frequencies for every length). Rows then depend on the longest sequence of their batch. The rotary modules of the
model are asked for two positions beside a far third one, so no long sequence is ever run. Sparse attention selects positions
once there are more than its budget, which the config names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import columns_of_one_scale, model_config, named_lengths, selected_positions, text_config

_CHANGING_TYPES = ("longrope", "su", "dynamic")


@dataclass(frozen=True)
class LengthLimits:
    """Lengths at which rows change with the length of their company.

    Attributes:
        cuts: ascending lengths; sequences of at most and of more than such a length must not share a forward.
        unsteady_past: above this length rows depend on the exact length of the longest sequence, and on what ran before; None
            where there is no such length.
        selects_past: the most positions of which attention takes every one; None where it never selects. In a wider forward near
            ties are decided by rounding, so that padding or a cache can change which positions a row attends to.
        scales_from: how wide a forward is from where on attention is scaled by the column, padding on the left included; None
            where it is not.
    """

    cuts: tuple[int, ...] = ()
    unsteady_past: int | None = None
    selects_past: int | None = None
    scales_from: int | None = None

    def scale_fault(self, columns: int) -> str | None:
        """Return why padding on the left changes rows of a forward of so many columns, with cached ones; None if it does not."""
        first = self.scales_from
        if first is None or columns < first:
            return None
        return (
            f"this model scales attention by the column from column {first} on, and takes padding on the left for positions; "
            f"found {columns} columns. Pad on the right, or run one sequence a forward."
        )

    def selection_fault(self, lengths: Sequence[int], columns: int, held: int = 0) -> str | None:
        """Return why sparse attention might select other positions than for each sequence alone; None where it does not.

        Args:
            lengths: as of `fault`.
            columns: positions that this forward attends to, padding and cached ones included.
            held: how many of them a cache holds.
        """
        past = self.selects_past
        if past is None or columns <= past or (not held and min(lengths) == columns):
            return None
        company = (
            f"a cache that holds {held}" if held else f"sequences of {min(lengths)} to {columns}, padded to one width"
        )
        return (
            f"this model attends to {past} selected positions, and rounding decides between near ties: with {columns} "
            f"positions in one forward, and {company}, a row may attend to others than in a forward of its sequence alone. "
            f"Run sequences longer than {past} positions one a forward, whole and unpadded (--exact)."
        )

    def fault(self, lengths: Sequence[int], width: int, held: int = 0) -> str | None:
        """Return why rows of one forward would not be those of their sequences alone; None where they are.

        Args:
            lengths: positions that each sequence has after this forward, padding left out.
            width: the largest number of positions that the model counts, padding included where it counts that.
            held: positions of the longest sequence that a cache holds already.
        """
        past = self.unsteady_past
        if past is not None and width > past:
            return (
                f"past {past} positions this model computes other rotary frequencies for every length, and keeps them for what "
                f"runs next; found {width} positions. Shorten the sequences to {past}."
            )
        for cut in self.cuts:
            if width > cut and min(lengths) <= cut:
                return (
                    f"this model changes its rotary frequencies for the whole batch once it holds more than {cut} positions; "
                    f"found sequences of {min(lengths)} and {width} positions, padding included. Run those of at most {cut} "
                    "apart from the longer ones."
                )
            if held and held <= cut < width:
                return (
                    f"this model changes its rotary frequencies once a sequence is longer than {cut} positions; the cache holds "
                    f"{held} positions with the former ones, and this call would reach {width}. Run the whole sequence again "
                    "without that cache."
                )
        return None


NO_LIMITS = LengthLimits()


def length_limits(model: nn.Module) -> LengthLimits:
    """Find the limits of `model` among the lengths that its config names; no forward of the model is run."""
    config = model_config(model)
    lengths = named_lengths(config)
    cuts: set[int] = set()
    unsteady: set[int] = set()
    examined = False
    for module, layer_type in _rotary_modules(model):
        for length in lengths:
            at, past, far = (_first_positions(module, layer_type, most) for most in (length - 1, length, 2 * length))
            if at is None or past is None or far is None:
                continue
            examined = True
            if not _same(at, past):
                cuts.add(length)
            if not _same(past, far) and not any(length < other <= 2 * length for other in lengths):
                unsteady.add(length)
    if not examined:
        cuts |= _stated_cuts(config)
    steady = min(unsteady, default=None)
    return LengthLimits(tuple(sorted(cuts)), steady, selected_positions(config), columns_of_one_scale(config))


def _rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str | None]]:
    """Modules that make rotary embeddings of position ids, one of each kind, with each kind of layer that they know."""
    seen: set[tuple[type[nn.Module], tuple[int, ...], str | None]] = set()
    for module in model.modules():
        name = type(module).__name__.lower()
        parameters = inspect.signature(type(module).forward).parameters
        if not ("rotary" in name or "rope" in name) or "position_ids" not in parameters:
            continue
        kinds = _layer_types(module) if "layer_type" in parameters else (None,)
        shapes = tuple(buffer.numel() for buffer in module.buffers(recurse=False))
        for kind in kinds:
            if (type(module), shapes, kind) not in seen:
                seen.add((type(module), shapes, kind))
                yield module, kind


def _layer_types(module: nn.Module) -> tuple[str | None, ...]:
    known = getattr(module, "rope_type", None)
    return tuple(known) if isinstance(known, dict) else (None,)


def _first_positions(module: nn.Module, layer_type: str | None, most: int) -> list[Tensor] | None:
    """Return a copied `module`'s output for positions 0 and 1 beside largest position `most`; None if it gives nothing.

    A copy, since such modules keep what a call computed.
    """
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    if device.type == "meta" or most < 2:
        return None
    kind = {} if layer_type is None else {"layer_type": layer_type}
    ids = torch.tensor([[0, 1, most]], device=device)
    for position_ids in (ids, ids[None].expand(3, 1, 3)):  # some have one row for each of three axes
        try:
            with torch.no_grad():
                given = copy.deepcopy(module)(torch.zeros(1, 3, 8, device=device), position_ids=position_ids, **kind)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            continue
        tensors = [given] if isinstance(given, Tensor) else [t for t in given if isinstance(t, Tensor)]
        axis = position_ids.ndim - 1
        found = [t.narrow(t.shape.index(3, min(axis, 1)), 0, 2) for t in tensors if 3 in t.shape[min(axis, 1) :]]
        if found:
            return found
    return None


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _stated_cuts(config: Any) -> set[int]:
    """Return the lengths at which a config's rotary embedding says that it changes, for code whose modules cannot be asked."""
    text = text_config(config)
    for name in ("rope_parameters", "rope_scaling"):
        stated = getattr(text, name, None)
        parts = [stated, *stated.values()] if isinstance(stated, dict) else []
        for part in parts:
            kind = (part.get("rope_type") or part.get("type")) if isinstance(part, dict) else None
            if kind in _CHANGING_TYPES:
                found = part.get("original_max_position_embeddings") or getattr(
                    text, "original_max_position_embeddings", None
                )
                found = found or getattr(text, "max_position_embeddings", None)
                return {found} if isinstance(found, int) else set()
    return set()
