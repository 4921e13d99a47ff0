"""Rows with values no trainer should read, found on the device and carried to the host beside the hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..outputs import Batch, CommittedTokens, CopyTensor, RowLayout

OK, NOT_FINITE, ALL_ZERO, OVERFLOW = range(4)
WORDS = {
    NOT_FINITE: "values that are not finite",
    ALL_ZERO: "rows that are all zero",
    OVERFLOW: "finite values that became infinite when stored as {dtype}",
}


@dataclass(frozen=True)
class RowFault:
    """What is wrong with some rows of one sample at one tap."""

    tap: str
    what: str
    first_token: int
    count: int

    def __str__(self) -> str:
        return f"{self.what} at {self.tap}: {self.count} row(s), the first at token {self.first_token}"

    def as_json(self) -> dict[str, Any]:
        return {"tap": self.tap, "what": self.what, "first_token": self.first_token, "rows": self.count}


def fault_codes(computed: Tensor, stored: Tensor, *, zero_is_fault: Tensor | bool) -> Tensor:
    """(T, K) uint8 codes of (T, K, H) rows, as the model computed them and as they are stored.

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
            faults = self._faults(self._codes[kept.rows])
            if faults:
                kept.request.report(faults)  # type: ignore[attr-defined]

    def _faults(self, codes: Tensor) -> list[RowFault]:
        """codes: (S, taps) of one sample."""
        faults = []
        for slot, tap in enumerate(self._taps):
            for code, words in WORDS.items():
                rows = (codes[:, slot] == code).nonzero()[:, 0]
                if len(rows):
                    what = words.format(dtype=str(self._store_dtype).removeprefix("torch."))
                    faults.append(RowFault(tap, what, int(rows[0]), len(rows)))
        return faults
