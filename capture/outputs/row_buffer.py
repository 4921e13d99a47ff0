"""Rows of one request, kept in memory."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...models.errors import UsageError
from .ragged_rows import RaggedRows
from .requests import Rows


class RowBuffer:
    """A row sink in memory: each column grows by consecutive positions.

    A column begins at the position that `starts` names for it, or at `otherwise`: what is sampled from the last prompt row
    of P begins at P-1, while the hidden states begin at 0.
    """

    def __init__(self, starts: Mapping[str, int] | None = None, otherwise: int = 0) -> None:
        self._starts, self._otherwise = dict(starts or {}), otherwise
        self._parts: dict[str, list[Rows]] = {}
        self._next: dict[str, int] = {}

    def next_position(self, name: str) -> int:
        """Return the position that the next row of column `name` must have."""
        return self._next.get(name, self._starts.get(name, self._otherwise))

    def append(self, first_position: int, rows: Mapping[str, Rows]) -> None:
        """Copy rows of named columns to the end of these columns, all of them or, on an error, none.

        Raises:
            UsageError: a gap, an overlap, columns of different row counts, or another shape or dtype than before.
        """
        if len({len(value) for value in rows.values()}) > 1:
            counts = {name: len(value) for name, value in rows.items()}
            raise UsageError(f"columns appended together need the same number of rows; found {counts}.")
        for name, value in rows.items():
            self._check_contiguous(name, first_position, len(value))
            self._check_kind(name, value)
        for name, value in rows.items():
            # A view would keep the whole batch alive, and its memory may be used again after this call.
            self._parts.setdefault(name, []).append(value.clone())
            self._next[name] = first_position + len(value)

    def columns(self) -> dict[str, Tensor]:
        """Return every dense column as one tensor (R, ...)."""
        return {
            name: torch.cat([part for part in parts if isinstance(part, Tensor)])
            for name, parts in self._parts.items()
            if isinstance(parts[0], Tensor)
        }

    def ragged_columns(self) -> dict[str, RaggedRows]:
        """Return every column of lists."""
        return {
            name: RaggedRows.concatenate([part for part in parts if isinstance(part, RaggedRows)])
            for name, parts in self._parts.items()
            if isinstance(parts[0], RaggedRows)
        }

    def _check_contiguous(self, name: str, first_position: int, count: int) -> None:
        expected = self.next_position(name)
        if first_position > expected:
            raise UsageError(
                f"rows {expected}..{first_position - 1} of {name!r} are missing: the next row due is {expected}, "
                f"found rows from {first_position}. Capture every position, without a prefix taken from a cache."
            )
        if first_position < expected:
            last = min(expected, first_position + max(count, 1)) - 1
            raise UsageError(
                f"rows {first_position}..{last} of {name!r} overlap: the next row due is {expected}, found rows from "
                f"{first_position}. Append each position once."
            )

    def _check_kind(self, name: str, value: Rows) -> None:
        if name not in self._parts:
            return
        expected, found = _kind(self._parts[name][0]), _kind(value)
        if expected != found:
            raise UsageError(f"rows of {name!r} must stay alike: expected {expected}, found {found}.")


def _kind(value: Rows) -> str:
    if isinstance(value, RaggedRows):
        return f"lists of {value.values.dtype}"
    return f"{value.dtype} rows of shape {tuple(value.shape[1:])}"
