"""Logit rules of a request: penalties, grammar and logit bias."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ....models.errors import RunError, UsageError
from .sampling_info import SamplingInfo, SamplingState


def penalised(logits: Tensor, info: SamplingInfo) -> Tensor:
    """Return (T, V) logits after repetition, presence and frequency penalties, in this order.

    The tensor itself where no request has penalties, else a new one.
    """
    if not any(request.params.has_penalties for request in info.row_requests):
        return logits
    rows = [
        _penalised_row(row, request) if request.params.has_penalties else row
        for row, request in zip(logits, info.row_requests, strict=True)
    ]
    return torch.stack(rows)


def _penalised_row(logits: Tensor, request: SamplingState) -> Tensor:
    params = request.params
    seen = _counts([*request.prompt_ids, *request.output_ids], logits) > 0
    sampled = _counts(request.output_ids, logits)
    factor = params.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - params.presence_penalty * (sampled > 0) - params.frequency_penalty * sampled


def _counts(token_ids: Sequence[int], logits: Tensor) -> Tensor:
    """Return (V,) int64: how often each token stands in `token_ids`."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
    return torch.bincount(ids, minlength=logits.shape[-1])


def constrained(logits: Tensor, info: SamplingInfo) -> Tensor:
    """Return (T, V) logits after each request's grammar and, behind it, its logit bias.

    The tensor itself where no request has either, else a new one: observers may still hold the old one.

    Raises:
        UsageError: a biased token id is outside the vocabulary.
        RunError: a grammar returned scores of another shape.
    """
    if not any(_is_constrained(request) for request in info.row_requests):
        return logits
    rows = [
        _constrained_row(row.clone(), request) if _is_constrained(request) else row
        for row, request in zip(logits, info.row_requests, strict=True)
    ]
    return torch.stack(rows)


def _is_constrained(request: SamplingState) -> bool:
    return request.params.logits_processor is not None or bool(request.params.logit_bias)


def _constrained_row(logits: Tensor, request: SamplingState) -> Tensor:
    if request.params.logits_processor is not None:
        ids = torch.tensor([[*request.prompt_ids, *request.output_ids]], dtype=torch.int64, device=logits.device)
        scores = request.params.logits_processor(ids, logits[None])
        if scores.shape != (1, len(logits)):
            raise RunError(
                f"a logits processor must return scores of shape {(1, len(logits))}; "
                f"{type(request.params.logits_processor).__name__} returned {tuple(scores.shape)}."
            )
        logits = scores[0]
    for token, bias in (request.params.logit_bias or {}).items():
        if token >= len(logits):
            raise UsageError(f"logit_bias names token {token}, but the model has {len(logits)} tokens.")
        logits[token] += bias
    return logits
