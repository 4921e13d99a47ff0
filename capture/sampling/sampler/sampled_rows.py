"""Rows that were sampled from: they can cross a pipeline, may refuse a token, and hold the sampled tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ....models.errors import RunError
from ...outputs import (
    Batch,
    CommittedTokens,
    CompositeHostAuxiliaryOutput,
    CopyTensor,
    DeviceStepRows,
    HostAuxiliaryOutput,
    HostStepRows,
    RowLayout,
)

_LAYOUT_NAME = "row_layout"


class DeviceSampledRows(DeviceStepRows):
    """Columns of the rows that were sampled from in one step, of the requests that asked for them."""

    def to_pp_tensors(self) -> dict[str, Tensor]:
        """Return the columns, and the row layout as (2, B) int64: row counts and first positions."""
        layout = torch.tensor([self.layout.row_counts, self.layout.first_positions], dtype=torch.int64)
        device = next(iter(self.columns.values())).device
        return {**self.columns, _LAYOUT_NAME: layout.to(device)}

    @classmethod
    def from_pp_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the rows whose `to_pp_tensors` gave `tensors`.

        Raises:
            RunError: the row layout is not among them.
        """
        if _LAYOUT_NAME not in tensors:
            raise RunError(
                f"sampled rows need a tensor {_LAYOUT_NAME!r} beside their columns; found {sorted(tensors)}."
            )
        counts, positions = tensors[_LAYOUT_NAME].tolist()
        layout = RowLayout(tuple(counts), tuple(positions), (0,) * len(counts))
        return cls({name: tensor for name, tensor in tensors.items() if name != _LAYOUT_NAME}, layout)


@dataclass(frozen=True)
class RefusedToken:
    """A sampled token that must not be committed.

    row: which of its request's rows of the step it was sampled from, from 0; the tokens of earlier rows may be committed.
    reason: why, for the caller of the request.
    """

    row: int
    reason: str


@runtime_checkable
class TokenRefusal(Protocol):
    """A host output that can tell, before the commit, that a sampled token must not be committed."""

    def refused(self) -> Mapping[int, RefusedToken]:
        """Return Index in the batch of each request that must end before one of this step's tokens, and the first such token."""


def refused_tokens(output: HostAuxiliaryOutput) -> dict[int, RefusedToken]:
    """Return the first refused token of each request in a step's root output, children of a composite included.

    Of two children that refuse the same token the later one's reason stands. Called between the step's wait and its commit.
    """
    if isinstance(output, CompositeHostAuxiliaryOutput):
        found: dict[int, RefusedToken] = {}
        for child in output.outputs:
            for index, token in refused_tokens(child).items():
                if index not in found or token.row <= found[index].row:
                    found[index] = token
        return found
    return dict(output.refused()) if isinstance(output, TokenRefusal) else {}


def rows_of_requests(layout: RowLayout) -> list[tuple[int, int]]:
    """Return (index of the request in the batch, which of its rows) of each row."""
    return [(index, row) for index, count in enumerate(layout.row_counts) for row in range(count)]


def first_refusals(layout: RowLayout, reasons: Iterable[str | None]) -> dict[int, RefusedToken]:
    """Return the first refused token of each request; `reasons` has one entry per row, `None` for a token that is welcome."""
    found: dict[int, RefusedToken] = {}
    for (index, row), reason in zip(rows_of_requests(layout), reasons, strict=True):
        if reason is not None:
            found.setdefault(index, RefusedToken(row, reason))
    return found


_NO_WEIGHT = (
    "No token had a positive probability: the logits are not finite, or grammar and logit bias rule out every token."
)


class DeviceSampledTokens(DeviceSampledRows):
    """Tokens of one step on the device.

    columns: `output_ids` (T,) int32 and `has_weight` (T,) bool: whether the token had a positive weight.
    """

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostSampledTokens":
        """Copy each column once and drop the device tensors."""
        return HostSampledTokens(self._copy_columns(copy_tensor), self.layout)


class HostSampledTokens(HostStepRows):
    """Tokens of one step on the host; `consume` appends `output_ids`."""

    def token_ids(self) -> list[list[int]]:
        """Return the tokens sampled for each request of the batch, in the order of its rows."""
        tokens = iter(self.columns["output_ids"].tolist())
        return [[next(tokens) for _ in range(count)] for count in self.layout.row_counts]

    def refused(self) -> Mapping[int, RefusedToken]:
        """Requests for which no token had a positive weight."""
        return first_refusals(self.layout, [None if has else _NO_WEIGHT for has in self.columns["has_weight"].tolist()])

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append `output_ids` of the committed rows."""
        self.layout.append_kept({"output_ids": self._take_columns()["output_ids"]}, batch, commits)
