"""Captured rows as one auxiliary output: as they are stored, with what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...hooks import Taps
from ..outputs import CompositeDeviceAuxiliaryOutput, DeviceAuxiliaryOutput, DeviceHiddenStates, RowLayout
from .row_faults import DeviceRowFaults, fault_codes


@dataclass(frozen=True)
class RowCheck:
    """What makes an output of captured rows.

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
