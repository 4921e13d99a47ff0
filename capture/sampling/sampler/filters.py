"""Filters of a sampling distribution: temperature, top-k, top-p, min-p."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .params import SamplingParams


def filtered_weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return (T, V) float32 weights of T rows, row t filtered as `params[t]` says; not renormalized, zero where ruled out.

    top-k and top-p are both measured on the full distribution and intersected, min-p follows; tokens as likely as the last
    one kept are kept too. A greedy row has weight 1 at its likeliest token alone. A row without a finite likeliest
    logit has no positive weight, or NaN.
    """
    # A greedy row is replaced below; 1 keeps its division out of trouble until then.
    temperature = _column([1.0 if p.is_greedy else p.temperature for p in params], logits)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    weights = torch.where(_kept(probabilities, params), probabilities, 0.0)
    greedy = [p.is_greedy for p in params]
    if not any(greedy):
        return weights
    return torch.where(_column(greedy, logits, torch.bool), _likeliest(logits), weights)


def _kept(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    cut = _column([p.min_p for p in params], probabilities) * probabilities.amax(dim=-1, keepdim=True)
    if any((p.top_k or p.top_p < 1) and not p.is_greedy for p in params):
        descending = probabilities.sort(dim=-1, descending=True).values
        last = torch.minimum(_top_k_count(descending, params), _top_p_count(descending, params)) - 1
        cut = torch.maximum(cut, descending.gather(-1, last))
    return probabilities >= cut


def _top_k_count(descending: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    size = descending.shape[-1]
    return _column([min(p.top_k or size, size) for p in params], descending, torch.int64)


def _top_p_count(descending: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return (T, 1): how many of the likeliest tokens are needed for the mass top_p; all of them where it is 1."""
    size = descending.shape[-1]
    before = descending.cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0.0
    needed = (before < _column([p.top_p for p in params], descending)).sum(dim=-1, keepdim=True).clamp(min=1)
    # Rounding lets the sum reach 1 before the last tokens, which "off" must not cut.
    return torch.where(_column([p.top_p == 1 for p in params], descending, torch.bool), size, needed)


def _likeliest(logits: Tensor) -> Tensor:
    top = logits.max(dim=-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, top.indices, torch.isfinite(top.values).to(logits.dtype))


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]
