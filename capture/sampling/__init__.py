"""Sampling with observers around it, and generation whose hidden states and sampling outputs share rows."""

from .first_token import FirstToken
from .handoff import MetadataBuffers
from .masked_log_softmax import masked_log_softmax
from .observers import LogprobObserver, SamplingObserver, TopKLogitsObserver
from .params import SamplingParams
from .sampled_rows import DeviceSampledRows, RefusedToken, TokenRefusal, refused_tokens
from .sampled_tokens import DeviceSampledTokens, HostSampledTokens
from .sampler import Sampler, SamplerOutput
from .sampling_info import AskedRows, SamplingInfo, SamplingState
from .sampling_mask import DeviceSamplingMasks, HostSamplingMasks, SamplingMaskObserver
from .topk_logits import DeviceTopKLogits, HostTopKLogits
from .transfer import receive_request, send_request

__all__ = [
    "AskedRows",
    "DeviceSampledRows",
    "DeviceSampledTokens",
    "DeviceSamplingMasks",
    "DeviceTopKLogits",
    "FirstToken",
    "HostSampledTokens",
    "HostSamplingMasks",
    "HostTopKLogits",
    "LogprobObserver",
    "MetadataBuffers",
    "RefusedToken",
    "Sampler",
    "SamplerOutput",
    "SamplingInfo",
    "SamplingMaskObserver",
    "SamplingObserver",
    "SamplingParams",
    "SamplingState",
    "TokenRefusal",
    "TopKLogitsObserver",
    "masked_log_softmax",
    "receive_request",
    "refused_tokens",
    "send_request",
]
