"""Logits that depend on which tokens came before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling_info import SamplingInfo, SamplingState


def penalised(logits: Tensor, info: SamplingInfo) -> Tensor:
    """(T, V) logits after repetition, presence and frequency penalties, in this order.

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
    """(V,) int64: how often each token stands in `token_ids`."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
    return torch.bincount(ids, minlength=logits.shape[-1])
