"""A column whose rows are lists of different lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.errors import UsageError


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """r lists of values, one after the other.

    lengths: (r,) int32; -1 says that the row has no list, which is not the same as an empty one.
    values: (sum of the lengths above zero,) the lists themselves.
    """

    lengths: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        expected = int(self.lengths.clamp(min=0).sum())
        if self.lengths.dim() != 1 or self.values.dim() != 1 or expected != len(self.values):
            raise UsageError(
                f"ragged rows need (r,) lengths and as many values as they add up to ({expected}); found lengths of "
                f"shape {tuple(self.lengths.shape)} and values of shape {tuple(self.values.shape)}."
            )

    @staticmethod
    def concatenate(parts: Sequence["RaggedRows"]) -> "RaggedRows":
        """Return the rows of all parts, in order, in memory of their own."""
        return RaggedRows(torch.cat([part.lengths for part in parts]), torch.cat([part.values for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> "RaggedRows":
        """Consecutive rows, as views."""
        begin, end, _ = rows.indices(len(self))
        sizes = self.lengths.clamp(min=0)
        first = int(sizes[:begin].sum())
        return RaggedRows(self.lengths[begin:end], self.values[first : first + int(sizes[begin:end].sum())])

    def clone(self) -> "RaggedRows":
        """Return the same rows in memory of their own."""
        return RaggedRows(self.lengths.clone(), self.values.clone())

    def to_lists(self) -> list[list[int] | None]:
        """Return one list per row; `None` where the row has none."""
        values = iter(self.values.tolist())
        return [None if size < 0 else [next(values) for _ in range(size)] for size in self.lengths.tolist()]
