"""Sampling with observers around it, and generation whose hidden states and sampling outputs share rows."""

from .disaggregation.handoff import FirstToken, MetadataBuffers
from .disaggregation.transfer import receive_request, send_request
from .generate import generate_with_capture
from .generation.finish import Aborts, Finish, FinishKind
from .generation.prompts import Prompt
from .generation.result import GenerationResult
from .generation.step_probes import StepError
from .masked_log_softmax import masked_log_softmax
from .sampler.observers import LogprobObserver, SamplingObserver, TopKLogitsObserver
from .sampler.params import SamplingParams
from .sampler.sampled_rows import (
    DeviceSampledRows,
    DeviceSampledTokens,
    HostSampledTokens,
    RefusedToken,
    TokenRefusal,
    refused_tokens,
)
from .sampler.sampler import Sampler, SamplerOutput
from .sampler.sampling_info import AskedRows, SamplingInfo, SamplingState
from .sampler.sampling_mask import DeviceSamplingMasks, HostSamplingMasks, SamplingMaskObserver
from .sampler.topk_logits import DeviceTopKLogits, HostTopKLogits

__all__ = [
    "Aborts",
    "AskedRows",
    "DeviceSampledRows",
    "DeviceSampledTokens",
    "DeviceSamplingMasks",
    "DeviceTopKLogits",
    "Finish",
    "FinishKind",
    "FirstToken",
    "GenerationResult",
    "HostSampledTokens",
    "HostSamplingMasks",
    "HostTopKLogits",
    "LogprobObserver",
    "MetadataBuffers",
    "Prompt",
    "RefusedToken",
    "Sampler",
    "SamplerOutput",
    "SamplingInfo",
    "SamplingMaskObserver",
    "SamplingObserver",
    "SamplingParams",
    "SamplingState",
    "StepError",
    "TokenRefusal",
    "TopKLogitsObserver",
    "generate_with_capture",
    "masked_log_softmax",
    "receive_request",
    "refused_tokens",
    "send_request",
]
