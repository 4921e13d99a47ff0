"""Post-norm rows made from stored pre-norm rows, by the model's own norm module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.errors import UsageError
from ...models.head import load_head
from ..store import CapturedDataset


class PostNorm:
    """The final norm of the captured model, from OUT/head or another head folder of the same model.

    Computes in the dtype that the model computed in and gives the dtype that the rows have: where rows were stored as
    computed, the bits are those that a capture with --final post stores.

    Raises:
        HeadError: a folder without a head.
        UsageError: a model without a final norm.
    """

    def __init__(self, dataset: CapturedDataset, head: Path | None = None, *, trust_remote_code: bool = False) -> None:
        self._norm = _norm_of(head or dataset.path / "head", trust_remote_code)
        self._compute = _compute_dtype(dataset)

    def require_columns(self, dataset: CapturedDataset) -> None:
        """UsageError where `dataset` has nothing to make post-norm from."""
        if len(dataset) and not {"pre_norm", "post_norm"} & dataset[0].keys():
            raise UsageError(
                f"{dataset.path} holds neither pre_norm nor post_norm, so there is nothing to make post-norm from; "
                "capture with --final pre."
            )

    @torch.no_grad()
    def rows(self, pre_norm: Tensor) -> Tensor:
        """(T, H) to (T, H), the dtype kept."""
        made: Tensor = self._norm(pre_norm.to(self._compute))
        return made.to(pre_norm.dtype)


def _norm_of(folder: Path, trust_remote_code: bool) -> nn.Module:
    norm = load_head(folder, trust_remote_code=trust_remote_code).norm
    if norm is None:
        raise UsageError(f"{folder} holds no final norm, so post-norm cannot be made from it.")
    return norm


def _compute_dtype(dataset: CapturedDataset) -> torch.dtype:
    name = dataset.metadata.get("compute_dtype")
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{dataset.path} does not say how its rows were computed (compute_dtype is {name!r}).")
    return found
