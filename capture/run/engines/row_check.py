"""Captured rows as one auxiliary output, with the values no trainer should read found on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....hooks import Taps
from ...outputs import (
    Batch,
    CommittedTokens,
    CompositeDeviceAuxiliaryOutput,
    CopyTensor,
    DeviceAuxiliaryOutput,
    DeviceHiddenStates,
    RowLayout,
)

OK, NOT_FINITE, ALL_ZERO, OVERFLOW = range(4)
WORDS = {
    NOT_FINITE: "values that are not finite",
    ALL_ZERO: "rows that are all zero",
    OVERFLOW: "finite values that became infinite when stored as {dtype}",
}


@dataclass(frozen=True)
class RowFault:
    """A fault of some rows of one sample at one tap."""

    tap: str
    what: str
    first_token: int
    count: int

    def __str__(self) -> str:
        return f"{self.what} at {self.tap}: {self.count} row(s), the first at token {self.first_token}"

    def as_json(self) -> dict[str, Any]:
        return {"tap": self.tap, "what": self.what, "first_token": self.first_token, "rows": self.count}


def fault_codes(computed: Tensor, stored: Tensor, *, zero_is_fault: Tensor | bool) -> Tensor:
    """Return (T, K) uint8 codes of (T, K, H) rows, as the model computed them and as they are stored.

    zero_is_fault: (K,) bool or bool; a zero row of the embeddings can be the model's own padding row.
    """
    largest = torch.linalg.vector_norm(computed, ord=torch.inf, dim=-1)
    finite = torch.isfinite(largest)
    codes = torch.where(finite, OK, NOT_FINITE).to(torch.uint8)
    codes[finite & (largest == 0) & zero_is_fault] = ALL_ZERO
    if stored.dtype != computed.dtype:
        kept = torch.isfinite(torch.linalg.vector_norm(stored, ord=torch.inf, dim=-1))
        codes[finite & ~kept] = OVERFLOW
    return codes


class DeviceRowFaults:
    """(T, taps) uint8 codes of one step on the device."""

    def __init__(self, codes: Tensor, layout: RowLayout, taps: tuple[str, ...], store_dtype: torch.dtype) -> None:
        self._codes, self._layout, self._taps, self._store_dtype = codes, layout, taps, store_dtype

    def copy_to_host(self, copy_tensor: CopyTensor) -> HostRowFaults:
        codes = copy_tensor(self._codes)
        del self._codes
        return HostRowFaults(codes, self._layout, self._taps, self._store_dtype)


class HostRowFaults:
    """The same codes on the host; tells each request of its faults."""

    def __init__(self, codes: Tensor, layout: RowLayout, taps: tuple[str, ...], store_dtype: torch.dtype) -> None:
        self._codes, self._layout, self._taps, self._store_dtype = codes, layout, taps, store_dtype

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Give every request with faulty rows its list of `RowFault`; the requests are `SampleRequest`s."""
        if not bool(self._codes.any()):
            return
        for kept in self._layout.kept_rows(batch, commits):
            faults = self._faults(self._codes[kept.rows], kept.first_position)
            if faults:
                kept.request.report(faults)  # type: ignore[attr-defined]

    def _faults(self, codes: Tensor, first_position: int) -> list[RowFault]:
        """codes: (S, taps) of one sample, from its position `first_position` on."""
        faults = []
        for slot, tap in enumerate(self._taps):
            for code, words in WORDS.items():
                rows = (codes[:, slot] == code).nonzero()[:, 0]
                if len(rows):
                    what = words.format(dtype=str(self._store_dtype).removeprefix("torch."))
                    faults.append(RowFault(tap, what, first_position + int(rows[0]), len(rows)))
        return faults


@dataclass(frozen=True)
class RowCheck:
    """Makes the auxiliary output of captured rows.

    Attributes:
        tap_names: what the taps are called where a fault is told, in slot order.
        zero_is_fault: (K,) bool on the device of the rows.
    """

    store_dtype: torch.dtype
    tap_names: tuple[str, ...]
    zero_is_fault: Tensor

    @classmethod
    def of(cls, taps: Taps, store_dtype: torch.dtype, tap_names: tuple[str, ...], device: torch.device) -> RowCheck:
        # Made once: a tensor made from a list on an accelerator waits for it.
        zero_is_fault = torch.tensor([b > 0 for b in taps.boundaries], device=device)
        return cls(store_dtype, tap_names, zero_is_fault)

    def output(
        self, computed: dict[str, Tensor], layout: RowLayout, beside: dict[str, Tensor] | None = None
    ) -> DeviceAuxiliaryOutput:
        """computed: `aux_hidden_states` (T, K, H), `pre_norm`, `post_norm` (T, H) as there, in the order of the taps.

        beside: other columns of the same rows, stored as they are.
        """
        stored = {name: rows.to(self.store_dtype) for name, rows in computed.items()}
        codes = torch.cat([self._codes(name, rows, stored[name]) for name, rows in computed.items()], 1)
        faults = DeviceRowFaults(codes, layout, self.tap_names, self.store_dtype)
        return CompositeDeviceAuxiliaryOutput((DeviceHiddenStates(stored | (beside or {}), layout), faults))

    def _codes(self, name: str, computed: Tensor, stored: Tensor) -> Tensor:
        if name != "aux_hidden_states":
            return fault_codes(computed[:, None], stored[:, None], zero_is_fault=True)
        return fault_codes(computed, stored, zero_is_fault=self.zero_is_fault)
