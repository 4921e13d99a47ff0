"""hiddentap: hidden states of causal language models, at explicit layers, exactly and once.

The public names are imported when they are first used, so that the command answers before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture.mixin import HiddenStateCaptureMixin, with_capture, without_capture
    from .capture.outputs import (
        CommittedTokens,
        CompositeDeviceAuxiliaryOutput,
        CompositeHostAuxiliaryOutput,
        DeviceAuxiliaryOutput,
        DeviceHiddenStates,
        HostAuxiliaryOutput,
        HostHiddenStates,
        append_auxiliary_output,
    )
    from .capture.run import CaptureSettings, RunSummary, TextSettings, capture_dataset
    from .capture.store import CapturedDataset, Shard
    from .hooks import tap
    from .models.errors import HiddentapError
    from .models.loading import ModelSource

_HOME = {
    ".capture.mixin": ("HiddenStateCaptureMixin", "with_capture", "without_capture"),
    ".capture.outputs": (
        "CommittedTokens",
        "CompositeDeviceAuxiliaryOutput",
        "CompositeHostAuxiliaryOutput",
        "DeviceAuxiliaryOutput",
        "DeviceHiddenStates",
        "HostAuxiliaryOutput",
        "HostHiddenStates",
        "append_auxiliary_output",
    ),
    ".capture.run": ("CaptureSettings", "RunSummary", "TextSettings", "capture_dataset"),
    ".capture.store": ("CapturedDataset", "Shard"),
    ".hooks": ("tap",),
    ".models.errors": ("HiddentapError",),
    ".models.loading": ("ModelSource",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CaptureSettings",
    "CapturedDataset",
    "CommittedTokens",
    "CompositeDeviceAuxiliaryOutput",
    "CompositeHostAuxiliaryOutput",
    "DeviceAuxiliaryOutput",
    "DeviceHiddenStates",
    "HiddenStateCaptureMixin",
    "HiddentapError",
    "HostAuxiliaryOutput",
    "HostHiddenStates",
    "ModelSource",
    "RunSummary",
    "Shard",
    "TextSettings",
    "append_auxiliary_output",
    "capture_dataset",
    "tap",
    "with_capture",
    "without_capture",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
