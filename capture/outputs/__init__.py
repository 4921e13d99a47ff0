"""The auxiliary-output contract: made on the device, copied to the host once, consumed once."""

from .commits import CommittedTokens, commits_of_step, visible_length
from .composite import CompositeDeviceAuxiliaryOutput, CompositeHostAuxiliaryOutput, append_auxiliary_output
from .contract import CopyTensor, DeviceAuxiliaryOutput, HostAuxiliaryOutput
from .host_copy import HostCopy, PendingHostCopy
from .pipeline_transport import (
    add_auxiliary_output_to_pp_tensors,
    pipeline_observer,
    pop_auxiliary_output_from_pp_tensors,
)
from .pp_tensors import PipelineParallelAuxiliaryOutput, PipelineParallelSamplingObserver
from .ragged_rows import RaggedRows
from .requests import Batch, Request, Rows, RowSink
from .row_buffer import RowBuffer
from .row_layout import KeptRows, RowLayout
from .step_rows import DeviceHiddenStates, DeviceStepRows, HostHiddenStates, HostStepRows

__all__ = [
    "Batch",
    "CommittedTokens",
    "CompositeDeviceAuxiliaryOutput",
    "CompositeHostAuxiliaryOutput",
    "CopyTensor",
    "DeviceAuxiliaryOutput",
    "DeviceHiddenStates",
    "DeviceStepRows",
    "HostAuxiliaryOutput",
    "HostCopy",
    "HostHiddenStates",
    "HostStepRows",
    "KeptRows",
    "PendingHostCopy",
    "PipelineParallelAuxiliaryOutput",
    "PipelineParallelSamplingObserver",
    "RaggedRows",
    "Request",
    "RowBuffer",
    "RowLayout",
    "RowSink",
    "Rows",
    "add_auxiliary_output_to_pp_tensors",
    "append_auxiliary_output",
    "commits_of_step",
    "pipeline_observer",
    "pop_auxiliary_output_from_pp_tensors",
    "visible_length",
]
