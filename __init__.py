"""hiddentap: hidden states of causal language models, at explicit layers, exactly and once.

The public names are imported when they are first used, so that the command answers before torch is loaded. The imports below are
the list of them: type checkers read it as it stands, and so does `public_names`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .models.public_names import public_names

if TYPE_CHECKING:
    from .capture.formats import ExportSettings as ExportSettings
    from .capture.formats import ImportSettings as ImportSettings
    from .capture.formats import check_export as check_export
    from .capture.formats import export_dataset as export_dataset
    from .capture.formats import import_dataset as import_dataset
    from .capture.mixin import HiddenStateCaptureMixin as HiddenStateCaptureMixin
    from .capture.mixin import with_capture as with_capture
    from .capture.mixin import without_capture as without_capture
    from .capture.outputs import CommittedTokens as CommittedTokens
    from .capture.outputs import CompositeDeviceAuxiliaryOutput as CompositeDeviceAuxiliaryOutput
    from .capture.outputs import CompositeHostAuxiliaryOutput as CompositeHostAuxiliaryOutput
    from .capture.outputs import DeviceAuxiliaryOutput as DeviceAuxiliaryOutput
    from .capture.outputs import DeviceHiddenStates as DeviceHiddenStates
    from .capture.outputs import HostAuxiliaryOutput as HostAuxiliaryOutput
    from .capture.outputs import HostHiddenStates as HostHiddenStates
    from .capture.outputs import add_auxiliary_output_to_pp_tensors as add_auxiliary_output_to_pp_tensors
    from .capture.outputs import append_auxiliary_output as append_auxiliary_output
    from .capture.outputs import pop_auxiliary_output_from_pp_tensors as pop_auxiliary_output_from_pp_tensors
    from .capture.progress import Done as Done
    from .capture.progress import Progress as Progress
    from .capture.progress import Work as Work
    from .capture.reading import PackedDataset as PackedDataset
    from .capture.reading import PackLoader as PackLoader
    from .capture.reading import PostNorm as PostNorm
    from .capture.reading import inspect_capture as inspect_capture
    from .capture.run import CaptureSettings as CaptureSettings
    from .capture.run import RayWorkers as RayWorkers
    from .capture.run import RunSummary as RunSummary
    from .capture.run import Stopping as Stopping
    from .capture.run import TextSettings as TextSettings
    from .capture.run import capture_dataset as capture_dataset
    from .capture.sampling import Aborts as Aborts
    from .capture.sampling import GenerationResult as GenerationResult
    from .capture.sampling import LogprobObserver as LogprobObserver
    from .capture.sampling import MetadataBuffers as MetadataBuffers
    from .capture.sampling import Prompt as Prompt
    from .capture.sampling import Sampler as Sampler
    from .capture.sampling import SamplingMaskObserver as SamplingMaskObserver
    from .capture.sampling import SamplingObserver as SamplingObserver
    from .capture.sampling import SamplingParams as SamplingParams
    from .capture.sampling import TopKLogitsObserver as TopKLogitsObserver
    from .capture.sampling import generate_with_capture as generate_with_capture
    from .capture.sampling import masked_log_softmax as masked_log_softmax
    from .capture.store import CapturedDataset as CapturedDataset
    from .capture.store import Shard as Shard
    from .capture.verify import Report as Report
    from .capture.verify import verify as verify
    from .hooks import tap as tap
    from .models.errors import HiddentapError as HiddentapError
    from .models.head import Head as Head
    from .models.head import load_head as load_head
    from .models.model_source import ModelSource as ModelSource

_MODULE_OF = public_names(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
