"""Sampling with observers around it, and generation whose hidden states and sampling outputs share rows."""

from .aborts import Aborts
from .finish import Finish, FinishKind
from .first_token import FirstToken
from .generate import generate_with_capture
from .handoff import MetadataBuffers
from .masked_log_softmax import masked_log_softmax
from .observers import LogprobObserver, SamplingObserver, TopKLogitsObserver
from .params import SamplingParams
from .prompts import Prompt
from .result import GenerationResult
from .sampled_rows import DeviceSampledRows, RefusedToken, TokenRefusal, refused_tokens
from .sampled_tokens import DeviceSampledTokens, HostSampledTokens
from .sampler import Sampler, SamplerOutput
from .sampling_info import AskedRows, SamplingInfo, SamplingState
from .sampling_mask import DeviceSamplingMasks, HostSamplingMasks, SamplingMaskObserver
from .step_probes import StepError
from .topk_logits import DeviceTopKLogits, HostTopKLogits
from .transfer import receive_request, send_request

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
