"""Sampling masks: the support each token was sampled from."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ....models.errors import RunError, UsageError
from ...outputs import Batch, CommittedTokens, CopyTensor, HostStepRows, RaggedRows, Rows
from .params import SamplingParams
from .sampled_rows import DeviceSampledRows, RefusedToken, first_refusals
from .sampling_info import SamplingInfo

_OK, _OVERFLOW, _INVALID = 0, 1, 2

_OVERFLOW_TEXT = (
    "Sampling support exceeds --sampling-mask-max-tokens={n}, commonly because of cutoff ties. Lower top_k to leave more "
    "headroom or increase the server limit."
)
_INVALID_TEXT = "The sampling backend selected a token outside its captured sampling support."


class SamplingMaskObserver:
    """Record the support of every token of requests with `return_sampling_mask`, and its log-probability in it.

    The support is the set that the token was sampled from: all tokens of positive weight after penalties, grammar, bias,
    temperature and filters. Nothing is added to make the token part of it.

    Args:
        max_tokens: a larger support ends the request; no part of it is stored.

    Raises:
        UsageError: room for no token.

    Example:
        >>> params = SamplingParams(top_k=3, max_new_tokens=2, ignore_eos=True, return_sampling_mask=True)
        >>> [result] = generate_with_capture(model, [[5, 6]], params, layer_ids=[1])  # adds this observer
        >>> result.sampling_mask.lengths
        tensor([-1,  3,  3], dtype=torch.int32)
    """

    def __init__(self, max_tokens: int = 4096) -> None:
        if max_tokens < 1:
            raise UsageError(f"a sampling mask needs room for at least one token; found max_tokens={max_tokens}.")
        self._max_tokens = max_tokens

    def is_active(self, sampling_info: SamplingInfo) -> bool:
        """Return whether a row of this call is asked for."""
        return bool(sampling_info.asked(_asks).rows)

    def before_grammar(self, logits: Tensor, sampling_info: SamplingInfo) -> SamplingInfo:  # noqa: ARG002
        """Keep `sampling_info`, which has the final weights when `after_sample` is called."""
        return sampling_info

    def after_sample(self, state: SamplingInfo, token_ids: Tensor) -> "DeviceSamplingMasks":
        """Return the supports of the rows that are asked for.

        Raises:
            RunError: the sampler did not set the weights that it sampled from.
        """
        if state.weights is None:
            raise RunError("a sampling mask needs sampling_info.weights, which the sampler sets before after_sample.")
        asked = state.asked(_asks)
        columns = _captured(asked.of(state.weights), asked.of(token_ids), self._max_tokens)
        return DeviceSamplingMasks(columns, asked.layout)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> "DeviceSamplingMasks":
        """Return the output that another pipeline stage sent."""
        return DeviceSamplingMasks.from_pp_tensors(tensors)


class DeviceSamplingMasks(DeviceSampledRows):
    """Supports of one step on the device.

    columns: `ids` (n, C) int32, C the size of the largest support, by descending weight, meaningful up to the row's size;
        `sizes` (n,) int32; `sampling_logprobs` (n,) float32; `status` (n,) int32, 0 ok, 1 overflow, 2 invalid; `limit` (n,)
        int32, the largest size allowed.
    """

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostSamplingMasks":
        """Copy each column once and drop the device tensors."""
        return HostSamplingMasks(self._copy_columns(copy_tensor), self.layout)


class HostSamplingMasks(HostStepRows):
    """Supports of one step on the host; `consume` appends `sampling_mask` (lists) and `sampling_logprobs`."""

    def refused(self) -> Mapping[int, RefusedToken]:
        """Requests whose support did not fit, or did not hold the sampled token with a finite log-probability."""
        columns = self.columns
        texts = {_OK: None, _OVERFLOW: _OVERFLOW_TEXT, _INVALID: _INVALID_TEXT}
        found = zip(columns["status"].tolist(), columns["limit"].tolist(), strict=True)
        reasons = [(texts[status], limit) for status, limit in found]
        return first_refusals(self.layout, [text and text.format(n=limit) for text, limit in reasons])

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append the supports of the committed rows, up to the first whose status is not ok, whatever is committed."""
        columns = self._take_columns()
        for kept in self.layout.kept_rows(batch, commits):
            rows = _rows_up_to_a_bad_one(columns["status"], kept.rows)
            if rows.start == rows.stop:
                continue
            lengths = columns["sizes"][rows]
            ids = [columns["ids"][row, :length] for row, length in enumerate(lengths.tolist(), rows.start)]
            columns_kept: dict[str, Rows] = {
                "sampling_mask": RaggedRows(lengths, torch.cat(ids)),
                "sampling_logprobs": columns["sampling_logprobs"][rows],
            }
            kept.request.rows.append(kept.first_position, columns_kept)


def _rows_up_to_a_bad_one(status: Tensor, rows: slice) -> slice:
    good = (status[rows] == _OK).tolist()
    return slice(rows.start, rows.start + (good.index(False) if False in good else len(good)))


def _captured(weights: Tensor, token_ids: Tensor, limit: int) -> dict[str, Tensor]:
    """Return the columns of (n, V) weights and the (n,) tokens sampled from them."""
    sizes = (weights > 0).sum(dim=-1)
    chosen = weights.gather(-1, token_ids[:, None]).squeeze(-1)
    logprobs = (chosen / weights.sum(dim=-1)).log()
    valid = (chosen > 0) & torch.isfinite(logprobs)
    status = torch.where(valid, torch.where(sizes > limit, _OVERFLOW, _OK), _INVALID)
    return {
        # As wide as the largest support and not as `limit`: one number comes from the device, thousands of ids need no sort.
        "ids": _by_descending_weight(weights, min(limit, int(sizes.max()))),
        "sizes": sizes.to(torch.int32),
        "sampling_logprobs": logprobs,
        "status": status.to(torch.int32),
        "limit": torch.full_like(sizes, limit, dtype=torch.int32),
    }


def _by_descending_weight(weights: Tensor, count: int) -> Tensor:
    """Return (n, count) int32 ids of the largest weights; equal weights by ascending id, whatever order top-k gives them."""
    ids = weights.topk(count, dim=-1).indices.sort(dim=-1).values
    order = weights.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order).to(torch.int32)


def _asks(params: SamplingParams) -> bool:
    return params.return_sampling_mask
