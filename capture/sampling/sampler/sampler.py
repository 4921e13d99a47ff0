"""The sampler: logits of a step in, one token per row out, observers around it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...outputs import DeviceAuxiliaryOutput, append_auxiliary_output
from .filters import filtered_weights
from .logit_rules import constrained, penalised
from .observers import SamplingObserver
from .sampled_rows import DeviceSampledTokens
from .sampling_info import SamplingInfo


@dataclass(frozen=True)
class SamplerOutput:
    """Output of one sampling call.

    token_ids: (T,) int64 on the device of the logits.
    tokens: the same tokens as an auxiliary output.
    observed: what the observers recorded, as one auxiliary output; `None` where they recorded nothing.
    """

    token_ids: Tensor
    tokens: DeviceSampledTokens
    observed: DeviceAuxiliaryOutput | None


class Sampler:
    """Sample one token per row, each request by its own parameters and with its own random numbers.

    A request with several rows draws one number for each: a caller that commits fewer tokens than were sampled rewinds its
    generator with `SamplingState.rewind`.

    In order: penalties, `before_grammar` of the active observers, grammar and logit bias, temperature and filters, one
    draw per row, `after_sample`. Batch mates change a request's tokens only by the rounding of the logits.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> from hiddentap.capture.sampling import SamplingInfo, SamplingState
        >>> request = SamplingState.of(SamplingParams(temperature=0), prompt_ids=[1, 2], output_ids=[])
        >>> info = SamplingInfo([request], RowLayout(row_counts=(1,), first_positions=(1,), prompt_counts=(0,)))
        >>> Sampler().sample(torch.tensor([[0.0, 3.0, 1.0]]), info).token_ids
        tensor([1])
    """

    def __init__(self, observers: Sequence[SamplingObserver] = ()) -> None:
        self._observers = tuple(observers)

    def sample(self, logits: Tensor, info: SamplingInfo) -> SamplerOutput:
        """Sample from logits (T, V) of any floating dtype; they are not written to.

        Raises:
            UsageError: a logit bias names a token outside the vocabulary.
            RunError: a grammar returned scores of another shape.
        """
        info.weights = None
        active = [observer for observer in self._observers if observer.is_active(info)]
        logits = penalised(logits.float(), info)
        states = [observer.before_grammar(logits, info) for observer in active]
        logits = constrained(logits, info)
        info.weights = filtered_weights(logits, [request.params for request in info.row_requests])
        token_ids = _drawn(info.weights, _uniforms(info))
        observed: DeviceAuxiliaryOutput | None = None
        for observer, state in zip(active, states, strict=True):
            if state is not None:
                observed = append_auxiliary_output(observed, observer.after_sample(state, token_ids))
        return SamplerOutput(token_ids, _tokens(token_ids, info.weights, info), observed)


def _uniforms(info: SamplingInfo) -> Tensor:
    """Return (T,) float64 in [0, 1): one number of each row's own generator."""
    return torch.tensor([request.next_uniform() for request in info.row_requests], dtype=torch.float64)


def _drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return (T,) int64: of each row of (T, V) weights the first token at which the running sum passes its uniform's share.

    A token without weight adds nothing to the sum and is never the first to pass.
    """
    wide = torch.float32 if weights.device.type == "mps" else torch.float64
    sums = weights.to(wide).cumsum(dim=-1)
    total = sums[:, -1:]
    share = uniforms.to(device=weights.device, dtype=wide)[:, None] * total
    # Rounding may lift the product to the total, which no running sum passes.
    share = torch.minimum(share, torch.nextafter(total, torch.zeros_like(total)))
    token_ids = torch.searchsorted(sums, share, right=True).squeeze(-1)
    # Only a row without any weight comes out behind the last token; it is marked as such by the caller.
    return token_ids.clamp(max=weights.shape[-1] - 1)


def _tokens(token_ids: Tensor, weights: Tensor, info: SamplingInfo) -> DeviceSampledTokens:
    has_weight = weights.gather(-1, token_ids[:, None]).squeeze(-1) > 0
    return DeviceSampledTokens({"output_ids": token_ids.to(torch.int32), "has_weight": has_weight}, info.layout)
