"""Foreign samples on their way into our columns: checked against what is claimed of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..store import Column
from .claim import Claim
from .errors import LayoutError
from .final_state import Norm
from .layout import ForeignSample


@dataclass(frozen=True)
class Columns:
    """The columns that every sample of an import fills.

    Attributes:
        K, H: layers and width. dtype: of the rows. final: which norm state `final` of a sample is; None for none.
    """

    K: int
    H: int
    dtype: torch.dtype
    final: Norm | None

    @classmethod
    def of(cls, sample: ForeignSample, claim: Claim, final: Norm | None) -> Columns:
        """Return the columns that fit the first sample.

        Raises:
            LayoutError: its states are not K wide rows of one width.
        """
        if sample.final is not None:
            H, dtype = sample.final.shape[-1], sample.final.dtype
        elif sample.aux is not None and claim.K:
            H, dtype = sample.aux.shape[-1] // claim.K, sample.aux.dtype
        else:
            raise LayoutError("the first sample holds no hidden states.")
        if claim.width not in (None, H):
            raise LayoutError(_misfit(sample, claim.K, claim.width))
        return cls(claim.K, H, dtype, final if sample.final is not None else None)

    def as_columns(self) -> tuple[Column, ...]:
        """Return columns for a shard writer, without absent norm states and layers."""
        aux = [Column("aux_hidden_states", self.dtype, (self.K, self.H))] if self.K else []
        final = [Column(f"{self.final}_norm", self.dtype, (self.H,))] if self.final else []
        return (*aux, *final, Column("input_ids", torch.int32), Column("loss_mask", torch.uint8))

    def rows(self, sample: ForeignSample) -> dict[str, Tensor]:
        """Return the rows of a sample by column.

        Raises:
            LayoutError: lengths, widths or dtypes that differ from the first sample's or from each other.
        """
        S = len(sample.input_ids)
        rows = {"input_ids": sample.input_ids.to(torch.int32), "loss_mask": sample.loss_mask.ne(0).to(torch.uint8)}
        if self.K:
            rows["aux_hidden_states"] = self._states(sample, sample.aux, self.K * self.H).view(-1, self.K, self.H)
        if self.final:
            rows[f"{self.final}_norm"] = self._states(sample, sample.final, self.H)
        lengths = {name: len(tensor) for name, tensor in rows.items()}
        if set(lengths.values()) != {S} or sample.input_ids.ndim != 1:
            raise LayoutError(f"expected one length for all of a sample's arrays, found {lengths}.")
        return rows

    def _states(self, sample: ForeignSample, states: Tensor | None, width: int) -> Tensor:
        if states is None or states.ndim != 2 or states.shape[1] != width or states.dtype != self.dtype:
            raise LayoutError(_misfit(sample, self.K, self.H) + f" as {self.dtype}")
        return states.contiguous()


def _misfit(sample: ForeignSample, K: int, H: int | None) -> str:
    found = {
        name: f"{tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in (("layers", sample.aux), ("last", sample.final))
        if tensor is not None
    }
    return f"expected {K} layers of width {H}, so rows of {K} x {H} and {H} values; found {found}"
