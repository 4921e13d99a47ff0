"""Images as rows of the sequence: one row for each image feature, in the place of the image's placeholder.

Mostly the processor repeats the placeholder, so that ids and rows agree. Some models (the code that comes with Kimi-K2.5's
checkpoints) take one placeholder an image and put its features there themselves: their hidden rows outnumber the ids that
went in, and only the expanded ids say which row is what.

B: rows of a batch, S: positions that go in, E >= S: positions after the expansion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Kimi-K2.5's own name first: where both are there, transformers filled in the other.
_PLACEHOLDERS = ("media_placeholder_token_id", "image_token_id", "image_token_index")
_GRIDS = ("image_grid_thw", "grid_thws")


@dataclass(frozen=True)
class OwnExpansion:
    """A batch as expanded by a model that expands placeholders itself.

    Attributes:
        input_ids: (B, E) int64, each placeholder repeated once per feature; where a row is shorter, the pad id or 0.
        is_text: (B, E) bool, False where a row holds an image feature.
        starts: where each batch row's first position lies among the E.
        added: positions that each batch row gained.
    """

    input_ids: Tensor
    is_text: Tensor
    starts: tuple[int, ...]
    added: tuple[int, ...]


def placeholder_id(config: Any) -> int | None:
    """Return the token id in whose place the model puts image features; None where the config names none."""
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return next((value for value in found if isinstance(value, int)), None)


def rows_of_images(config: Any, arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return how many features each image of a call has: the patches of its grid, merged as the vision tower merges them.

    None where the call holds no grid, or the config does not say how patches are merged.
    """
    grid = next((arguments[name] for name in _GRIDS if arguments.get(name) is not None), None)
    area = _merged_patches(getattr(config, "vision_config", None))
    if grid is None or area is None:
        return None
    return tuple(int(height) * int(width) // area for _, height, width in torch.as_tensor(grid).tolist())


def own_expansion(config: Any, input_ids: Tensor | None, arguments: Mapping[str, Any]) -> OwnExpansion | None:
    """Return the model's expansion of (B, S) ids with one placeholder per image; None if ids and rows agree unexpanded."""
    token, rows = placeholder_id(config), rows_of_images(config, arguments)
    if input_ids is None or token is None or rows is None:
        return None
    ids = input_ids.detach().to("cpu", torch.int64)
    placed = int((ids == token).sum())
    if placed != len(rows) or sum(rows) == placed:
        return None
    return _expanded(ids, token, rows, getattr(config, "pad_token_id", None))


def repeated(ids: Tensor, token: int, rows: Sequence[int]) -> Tensor:
    """Return (S,) ids with the i-th placeholder `token` repeated rows[i] times: (E,)."""
    counts = torch.ones_like(ids)
    counts[ids == token] = torch.tensor(list(rows), dtype=ids.dtype)
    return torch.repeat_interleave(ids, counts)


def _expanded(ids: Tensor, token: int, rows: tuple[int, ...], pad: int | None) -> OwnExpansion:
    per_row, taken = [], 0
    for row in ids:
        count = int((row == token).sum())
        per_row.append(repeated(row, token, rows[taken : taken + count]))
        taken += count
    E = max(len(row) for row in per_row)
    # The models' own rule: rows are moved to the right end unless one of them ends with a pad.
    left = pad is None or not bool((ids[:, -1] == pad).any())
    starts = tuple(E - len(row) if left else 0 for row in per_row)
    expanded = torch.full((len(per_row), E), 0 if pad is None else pad)
    is_text = torch.ones(len(per_row), E, dtype=torch.bool)
    for b, (start, row) in enumerate(zip(starts, per_row, strict=True)):
        expanded[b, start : start + len(row)] = row
        is_text[b, start : start + len(row)] = row != token
    return OwnExpansion(expanded, is_text, starts, tuple(len(row) - ids.shape[1] for row in per_row))


def _merged_patches(vision_config: Any) -> int | None:
    """Return how many patches of the vision tower become one feature."""
    kernel = getattr(vision_config, "merge_kernel_size", None)
    if isinstance(kernel, (list, tuple)) and len(kernel) == 2:
        return int(kernel[0]) * int(kernel[1])
    side = getattr(vision_config, "spatial_merge_size", None)
    return side * side if isinstance(side, int) else None
