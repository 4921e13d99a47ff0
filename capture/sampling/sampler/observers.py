"""Observers: they look at a sampling call and record something of it."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ...outputs import DeviceAuxiliaryOutput
from .sampled_rows import DeviceSampledRows
from .sampling_info import AskedRows, SamplingInfo
from .topk_logits import DeviceTopKLogits


class SamplingObserver(Protocol):
    """Observes one sampling call from inside the sampler: `is_active`, then `before_grammar`, then `after_sample`.

    Changes nothing that it sees. The distribution that was sampled *from* is known only after the call: an observer of it keeps
    `sampling_info` as its state and reads `sampling_info.weights` in `after_sample`.

    Example:
        >>> from hiddentap.capture.sampling import DeviceSampledRows
        >>> class Entropy:
        ...     def is_active(self, info):
        ...         return True
        ...
        ...     def before_grammar(self, logits, info):
        ...         return torch.distributions.Categorical(logits=logits).entropy(), info.layout
        ...
        ...     def after_sample(self, state, token_ids):
        ...         return DeviceSampledRows({"entropy": state[0]}, state[1])
        >>> params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        >>> [result] = generate_with_capture(model, [[5, 6]], params, layer_ids=[1], observers=[Entropy()])
        >>> result.observed["entropy"].shape
        torch.Size([3])
    """

    def is_active(self, sampling_info: SamplingInfo) -> bool:
        """Return whether to look at this call; asked once per call."""

    def before_grammar(self, logits: Tensor, sampling_info: SamplingInfo) -> Any:
        """See the (T, V) float32 logits after penalties, before grammar and bias; `None` ends the observation."""

    def after_sample(self, state: Any, token_ids: Tensor) -> DeviceAuxiliaryOutput | None:
        """See the (T,) int64 sampled tokens, and return what was recorded."""


class LogprobObserver:
    """Record `logprobs`: each token's log-probability under the model, of requests with `return_logprob`.

    It is computed from the logits after penalties, before grammar, bias and temperature, over the whole vocabulary.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> from hiddentap.capture.sampling import SamplingInfo, SamplingState
        >>> request = SamplingState.of(SamplingParams(temperature=0, return_logprob=True), [1, 2], [])
        >>> info = SamplingInfo([request], RowLayout((1,), (1,), (0,)))
        >>> Sampler([LogprobObserver()]).sample(torch.zeros(1, 4), info).observed.columns["logprobs"].exp()
        tensor([0.2500])
    """

    def is_active(self, sampling_info: SamplingInfo) -> bool:
        """Return whether a row of this call is asked for."""
        return bool(_asked_logprob(sampling_info).rows)

    def before_grammar(self, logits: Tensor, sampling_info: SamplingInfo) -> tuple[AskedRows, Tensor]:
        """Keep the rows that are asked for, and their (n, V) logits."""
        asked = _asked_logprob(sampling_info)
        return asked, asked.of(logits)

    def after_sample(self, state: tuple[AskedRows, Tensor], token_ids: Tensor) -> DeviceSampledRows:
        """Return `logprobs` (n,) float32."""
        asked, logits = state
        chosen = logits.gather(-1, asked.of(token_ids)[:, None]).squeeze(-1)
        return DeviceSampledRows({"logprobs": chosen - logits.logsumexp(dim=-1)}, asked.layout)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> DeviceSampledRows:
        """Return the output that another pipeline stage sent."""
        return DeviceSampledRows.from_pp_tensors(tensors)


class TopKLogitsObserver:
    """Record the `top_logits` largest logits of every sampled row, and the log-sum-exp that normalizes them.

    `topk_logits` (r, k) float32, descending, `topk_ids` (r, k) int32, `topk_logsumexp` (r,) float32 over the whole
    vocabulary: `topk_logits - topk_logsumexp` are log-probabilities. Computed from the logits after penalties, before grammar,
    bias and temperature.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> from hiddentap.capture.sampling import SamplingInfo, SamplingState
        >>> request = SamplingState.of(SamplingParams(temperature=0, top_logits=2), [1, 2], [])
        >>> info = SamplingInfo([request], RowLayout((1,), (1,), (0,)))
        >>> Sampler([TopKLogitsObserver()]).sample(torch.tensor([[0.0, 3.0, 1.0]]), info).observed.columns["topk_ids"]
        tensor([[1, 2]], dtype=torch.int32)
    """

    def is_active(self, sampling_info: SamplingInfo) -> bool:
        """Return whether a row of this call is asked for."""
        return bool(_asked_top_logits(sampling_info).rows)

    def before_grammar(self, logits: Tensor, sampling_info: SamplingInfo) -> DeviceTopKLogits:
        """Take the logits at once: the sampled token does not matter to them."""
        asked = _asked_top_logits(sampling_info)
        rows = sampling_info.row_requests
        counts = [min(rows[row].params.top_logits, logits.shape[-1]) for row in asked.rows]
        chosen = asked.of(logits)
        top = chosen.topk(max(counts), dim=-1)
        return DeviceTopKLogits(
            {
                "topk_logits": top.values,
                "topk_ids": top.indices.to(torch.int32),
                "topk_logsumexp": chosen.logsumexp(dim=-1),
                "topk_counts": torch.tensor(counts, dtype=torch.int32, device=logits.device),
            },
            asked.layout,
        )

    def after_sample(self, state: DeviceTopKLogits, token_ids: Tensor) -> DeviceTopKLogits:  # noqa: ARG002
        """Return what `before_grammar` computed."""
        return state

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> DeviceTopKLogits:
        """Return the output that another pipeline stage sent."""
        return DeviceTopKLogits.from_pp_tensors(tensors)


def _asked_logprob(info: SamplingInfo) -> AskedRows:
    return info.asked(lambda params: params.return_logprob)


def _asked_top_logits(info: SamplingInfo) -> AskedRows:
    return info.asked(lambda params: params.top_logits > 0)
