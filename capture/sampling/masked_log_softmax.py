"""Log-probabilities over a recorded support, on the side of a trainer."""

import torch
from torch import Tensor

from ...models.errors import UsageError
from ..outputs import RaggedRows


def masked_log_softmax(logits: Tensor, mask: Tensor | RaggedRows) -> Tensor:
    """Return log-probabilities (..., V) of the distribution restricted to a support; differentiable in `logits`.

    Args:
        logits: (..., V), divided by the temperature that the tokens were sampled with. Computed and returned in float32
            where they are narrower.
        mask: bool (..., V), true inside the support; or lists of token ids, one per row of logits (R, V). A row without a
            list (it was not asked for, or nothing was sampled) is normalized over the whole vocabulary.

    Outside the support the result is `-inf` and its gradient is zero; so it is everywhere in a row of empty support.

    Raises:
        UsageError: shapes that do not fit, or an id outside the vocabulary.

    Example:
        >>> masked_log_softmax(torch.zeros(1, 4), torch.tensor([[True, True, False, False]])).exp()
        tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    support = _support(mask, logits) if isinstance(mask, RaggedRows) else mask
    if support.dtype != torch.bool or support.shape != logits.shape:
        raise UsageError(
            f"a mask is bool and shaped like the logits {tuple(logits.shape)}; found {support.dtype} "
            f"{tuple(support.shape)}."
        )
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    empty = ~support.any(dim=-1, keepdim=True)
    # A row of -inf alone would give NaN, in the gradient too: empty rows are computed as if full, then replaced.
    log_probabilities = torch.log_softmax(wide.masked_fill(~(support | empty), -torch.inf), dim=-1)
    return log_probabilities.masked_fill(~support, -torch.inf)


def _support(mask: RaggedRows, logits: Tensor) -> Tensor:
    """Return (R, V) bool."""
    if logits.dim() != 2 or len(mask) != len(logits):
        raise UsageError(
            f"{len(mask)} lists of token ids need logits of shape ({len(mask)}, V); found {tuple(logits.shape)}."
        )
    lengths = mask.lengths.to(logits.device, torch.int64)
    ids = mask.values.to(logits.device, torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
        raise UsageError(
            f"token ids of a mask must be in 0..{logits.shape[-1] - 1}; found {int(ids.min())}..{int(ids.max())}."
        )
    rows = torch.repeat_interleave(torch.arange(len(logits), device=logits.device), lengths.clamp(min=0))
    support = (lengths < 0)[:, None].repeat(1, logits.shape[-1])
    support[rows, ids] = True
    return support
