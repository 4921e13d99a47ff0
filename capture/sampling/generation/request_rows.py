"""The rows of a finished request, every column as long as the others: as in a shard."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....hooks import TappedModel
from ...outputs import RaggedRows
from ...store import Column, capture_columns, generation_columns
from ..sampler.params import SamplingParams
from .request import HIDDEN_COLUMNS, GenerationRequest

SAMPLING_MASK = "sampling_mask"


@dataclass(frozen=True)
class GenerationColumns:
    """The columns of a run: what any of its requests asked for.

    columns: as a shard has them; sampling masks are a pair of these.
    """

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], tapped: TappedModel) -> "GenerationColumns":
        """Return the columns of requests with these parameters and the states of `tapped`."""
        taps, K = tapped.taps, len(tapped.taps.boundaries)
        hidden = capture_columns(
            K,
            tapped.hidden_size,
            tapped.dtype,
            norm_size=tapped.norm_size,
            pre_norm=taps.pre_norm,
            post_norm=taps.post_norm,
        )
        masks = any(one.return_sampling_mask for one in params)
        sampled = generation_columns(
            sampling_logprobs=masks,
            logprobs=any(one.return_logprob for one in params),
            sampling_masks=masks,
            topk=max((one.top_logits for one in params), default=0),
        )
        return cls(tuple(column for column in (*hidden, *sampled) if K or column.name != HIDDEN_COLUMNS[0]))

    def dense(self, request: GenerationRequest) -> dict[str, Tensor]:
        """Return (R, ...) of every column but those of sampling masks; NaN or -1 where nothing was sampled or asked for."""
        found = request.rows.columns()
        own = {"input_ids": _input_ids(request), "loss_mask": _loss_mask(request)}
        return {
            column.name: own[column.name] if column.name in own else _filled(column, found.get(column.name), request)
            for column in self.columns
            if not column.name.startswith(SAMPLING_MASK)
        }

    def sampling_mask(self, request: GenerationRequest) -> RaggedRows | None:
        """(R,) lists: the support each row's token was sampled from, none where there is none; `None` where nobody asked."""
        if not any(column.name.startswith(SAMPLING_MASK) for column in self.columns):
            return None
        found = request.rows.ragged_columns().get(SAMPLING_MASK)
        lengths = torch.full((request.R,), -1, dtype=torch.int32)
        if found is None:
            return RaggedRows(lengths, torch.empty(0, dtype=torch.int32))
        lengths[request.R - len(found) :] = found.lengths
        return RaggedRows(lengths, found.values)

    def observed(self, request: GenerationRequest) -> dict[str, Tensor]:
        """Return the rows of the caller's own observers, one for each output token."""
        known = {column.name for column in self.columns}
        return {name: rows for name, rows in request.rows.columns().items() if name not in known}


def _input_ids(request: GenerationRequest) -> Tensor:
    return torch.tensor([*request.prompt.token_ids, *request.token_ids][: request.R], dtype=torch.int32)


def _loss_mask(request: GenerationRequest) -> Tensor:
    """1 on tokens that the model wrote."""
    return (torch.arange(request.R) >= request.P).to(torch.uint8)


def _filled(column: Column, rows: Tensor | None, request: GenerationRequest) -> Tensor:
    """Return the rows of a column at the end of R rows, narrower ones in its first places."""
    if rows is not None and tuple(rows.shape) == (request.R, *column.shape):
        return rows
    absent = float("nan") if column.dtype.is_floating_point else -1
    full = torch.full((request.R, *column.shape), absent, dtype=column.dtype)
    if rows is None:
        return full
    place = full[request.R - len(rows) :]
    (place if rows.dim() == 1 else place[:, : rows.shape[1]]).copy_(rows)
    return full
