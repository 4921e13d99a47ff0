"""hiddentap: hidden states of causal language models, at explicit layers, exactly and once.

The public names are imported when they are first used, so that the command answers before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture.formats import ExportSettings, ImportSettings, export_dataset, import_dataset
    from .capture.mixin import HiddenStateCaptureMixin, with_capture, without_capture
    from .capture.outputs import (
        CommittedTokens,
        CompositeDeviceAuxiliaryOutput,
        CompositeHostAuxiliaryOutput,
        DeviceAuxiliaryOutput,
        DeviceHiddenStates,
        HostAuxiliaryOutput,
        HostHiddenStates,
        add_auxiliary_output_to_pp_tensors,
        append_auxiliary_output,
        pop_auxiliary_output_from_pp_tensors,
    )
    from .capture.reading import PackedDataset, PackLoader, PostNorm
    from .capture.run import CaptureSettings, RayWorkers, RunSummary, TextSettings, capture_dataset
    from .capture.sampling import (
        Aborts,
        GenerationResult,
        LogprobObserver,
        MetadataBuffers,
        Prompt,
        Sampler,
        SamplingMaskObserver,
        SamplingObserver,
        SamplingParams,
        TopKLogitsObserver,
        generate_with_capture,
        masked_log_softmax,
    )
    from .capture.store import CapturedDataset, Shard
    from .capture.verify import Report, verify
    from .hooks import tap
    from .models.errors import HiddentapError
    from .models.loading import ModelSource

_HOME = {
    ".capture.formats": (
        "ExportSettings",
        "ImportSettings",
        "export_dataset",
        "import_dataset",
    ),
    ".capture.mixin": (
        "HiddenStateCaptureMixin",
        "with_capture",
        "without_capture",
    ),
    ".capture.outputs": (
        "CommittedTokens",
        "CompositeDeviceAuxiliaryOutput",
        "CompositeHostAuxiliaryOutput",
        "DeviceAuxiliaryOutput",
        "DeviceHiddenStates",
        "HostAuxiliaryOutput",
        "HostHiddenStates",
        "add_auxiliary_output_to_pp_tensors",
        "append_auxiliary_output",
        "pop_auxiliary_output_from_pp_tensors",
    ),
    ".capture.reading": (
        "PackLoader",
        "PackedDataset",
        "PostNorm",
    ),
    ".capture.run": (
        "CaptureSettings",
        "RayWorkers",
        "RunSummary",
        "TextSettings",
        "capture_dataset",
    ),
    ".capture.sampling": (
        "Aborts",
        "Prompt",
        "GenerationResult",
        "LogprobObserver",
        "MetadataBuffers",
        "Sampler",
        "SamplingMaskObserver",
        "SamplingObserver",
        "SamplingParams",
        "TopKLogitsObserver",
        "generate_with_capture",
        "masked_log_softmax",
    ),
    ".capture.store": (
        "CapturedDataset",
        "Shard",
    ),
    ".capture.verify": (
        "Report",
        "verify",
    ),
    ".hooks": ("tap",),
    ".models.errors": ("HiddentapError",),
    ".models.loading": ("ModelSource",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Aborts",
    "CaptureSettings",
    "CapturedDataset",
    "CommittedTokens",
    "CompositeDeviceAuxiliaryOutput",
    "CompositeHostAuxiliaryOutput",
    "DeviceAuxiliaryOutput",
    "DeviceHiddenStates",
    "ExportSettings",
    "GenerationResult",
    "HiddenStateCaptureMixin",
    "HiddentapError",
    "HostAuxiliaryOutput",
    "HostHiddenStates",
    "ImportSettings",
    "LogprobObserver",
    "MetadataBuffers",
    "ModelSource",
    "PackLoader",
    "PackedDataset",
    "PostNorm",
    "Prompt",
    "RayWorkers",
    "Report",
    "RunSummary",
    "Sampler",
    "SamplingMaskObserver",
    "SamplingObserver",
    "SamplingParams",
    "Shard",
    "TextSettings",
    "TopKLogitsObserver",
    "add_auxiliary_output_to_pp_tensors",
    "append_auxiliary_output",
    "capture_dataset",
    "export_dataset",
    "generate_with_capture",
    "import_dataset",
    "masked_log_softmax",
    "pop_auxiliary_output_from_pp_tensors",
    "tap",
    "verify",
    "with_capture",
    "without_capture",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
