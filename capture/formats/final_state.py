"""The last hidden states as a trainer wants them, before or after the final norm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .captured import CapturedFolder
from .errors import FormatError
from .head_folder import HeadFolder

Norm = Literal["pre", "post"]


class FinalState:
    """Rows of the stored column that is wanted, or post-norm made from stored pre-norm by the model's own norm module.

    Raises:
        FormatError: pre-norm is wanted and not stored (a norm cannot be undone), or post-norm is wanted and neither it nor
            pre-norm with a head is there.
    """

    def __init__(self, captured: CapturedFolder, head: HeadFolder, wanted: Norm, trainer: str) -> None:
        self._captured = captured
        self._norm: torch.nn.Module | None = None
        self._column = f"{wanted}_norm"
        if self._column in captured.columns:
            return
        if wanted == "pre":
            held = "post-norm only" if "post_norm" in captured.columns else "neither norm state"
            raise FormatError(
                f"{trainer} applies the final norm itself and wants what enters it; this capture holds {held}, and a norm "
                "cannot be undone. Capture again with --final pre."
            )
        if "pre_norm" not in captured.columns:
            raise FormatError(
                f"{trainer} wants the last hidden states after the final norm; this capture holds neither norm state. "
                "Capture again with --final post, or --final pre --head."
            )
        self._column = "pre_norm"
        self._norm = head.norm(f"making post-norm for {trainer}")

    @property
    def derived(self) -> bool:
        """Return whether the norm is applied here."""
        return self._norm is not None

    @torch.no_grad()
    def rows(self, i: int, rows: int) -> Tensor:
        """Return (rows, H) in the dtype of the stored rows: the first rows of sample i of the capture."""
        stored = self._captured.final(i, self._column, rows)
        if self._norm is None:
            return stored
        made: Tensor = self._norm(stored.to(self._captured.compute_dtype))
        return made.to(stored.dtype)
