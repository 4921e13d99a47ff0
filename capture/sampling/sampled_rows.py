"""Columns of sampled rows, which can cross a pipeline and may refuse a token."""

from collections.abc import Mapping
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ...models.errors import RunError
from ..outputs import CompositeHostAuxiliaryOutput, DeviceStepRows, HostAuxiliaryOutput, RowLayout

_LAYOUT_NAME = "row_layout"


class DeviceSampledRows(DeviceStepRows):
    """Columns of the rows that were sampled from in one step, of the requests that asked for them."""

    def to_pp_tensors(self) -> dict[str, Tensor]:
        """The columns, and the row layout as (2, B) int64: row counts and first positions."""
        layout = torch.tensor([self.layout.row_counts, self.layout.first_positions], dtype=torch.int64)
        device = next(iter(self.columns.values())).device
        return {**self.columns, _LAYOUT_NAME: layout.to(device)}

    @classmethod
    def from_pp_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The rows whose `to_pp_tensors` gave `tensors`.

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


@runtime_checkable
class TokenRefusal(Protocol):
    """A host output that can tell, before the commit, that a sampled token must not be committed."""

    def refused(self) -> Mapping[int, str]:
        """Index in the batch of each request that must end without this step's token, and why."""


def refused_tokens(output: HostAuxiliaryOutput) -> dict[int, str]:
    """The refusals of a step's root output, children of a composite included; a later child's reason stands.

    Called between the step's wait and its commit.
    """
    if isinstance(output, CompositeHostAuxiliaryOutput):
        return {index: reason for child in output.outputs for index, reason in refused_tokens(child).items()}
    return dict(output.refused()) if isinstance(output, TokenRefusal) else {}


def requests_of_rows(layout: RowLayout) -> list[int]:
    """Index in the batch of the request that each row belongs to."""
    return [index for index, count in enumerate(layout.row_counts) for _ in range(count)]
