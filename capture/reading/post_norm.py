"""Post-norm rows made from stored pre-norm rows, by the model's own norm module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.errors import UsageError
from ..store import CapturedDataset


class PostNorm(nn.Module):
    """The final norm of the captured model, from OUT/head or another head folder of the same model.

    Called with rows before the final norm (..., H), it returns rows after it, of the same shape and dtype. Computes in the dtype
    that the model computed in: where rows were stored as computed, the bits are those of a capture with --final post.

    Args:
        dataset: the capture whose rows it is for.
        head: another head folder than the capture's own.
        trust_remote_code: let code that comes with the model run.

    Raises:
        HeadError: a folder without a head.
        UsageError: a model without a final norm, or no transformers installed, which builds the model's norm.

    Example:
        >>> dataset = CapturedDataset("OUT")
        >>> PostNorm(dataset)(dataset[0]["pre_norm"]).shape
        torch.Size([53, 32])
    """

    def __init__(self, dataset: CapturedDataset, head: Path | None = None, *, trust_remote_code: bool = False) -> None:
        super().__init__()
        self.norm = _norm_of(head or dataset.path / "head", trust_remote_code)
        self._compute = _compute_dtype(dataset)

    def require_columns(self, dataset: CapturedDataset) -> None:
        """Raise UsageError where `dataset` has no pre_norm to compute post_norm from."""
        if len(dataset) and not {"pre_norm", "post_norm"} & dataset[0].keys():
            raise UsageError(
                f"{dataset.path} holds neither pre_norm nor post_norm, so there is nothing to make post-norm from; "
                "capture with --final pre."
            )

    @torch.no_grad()
    def forward(self, pre_norm: Tensor) -> Tensor:
        """Return post-norm rows (..., H) for pre-norm rows (..., H), the dtype kept."""
        made: Tensor = self.norm(pre_norm.to(self._compute))
        return made.to(pre_norm.dtype)


def _norm_of(folder: Path, trust_remote_code: bool) -> nn.Module:
    # Only the model's own class computes its norm: a reader's install, without transformers, reads and packs all the same.
    try:
        from ...models.head import load_head
    except ModuleNotFoundError as error:
        raise UsageError(
            f"post-norm is made by the model's own norm module, which needs the package {error.name}; install hiddentap with its "
            "dependencies, or capture with --final both."
        ) from error
    norm = load_head(folder, trust_remote_code=trust_remote_code).norm
    if norm is None:
        raise UsageError(f"{folder} holds no final norm, so post-norm cannot be made from it.")
    return norm


def _compute_dtype(dataset: CapturedDataset) -> torch.dtype:
    about = dataset.description
    found = about.torch_compute_dtype
    if found is None:
        raise UsageError(
            f"{dataset.path} does not say how its rows were computed (compute_dtype is {about.compute_dtype!r})."
        )
    return found
