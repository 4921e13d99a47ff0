"""The interface of an auxiliary output that crosses a pipeline: named tensors."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from ...models.errors import RunError
from .contract import DeviceAuxiliaryOutput


@runtime_checkable
class PipelineParallelAuxiliaryOutput(Protocol):
    """An auxiliary output that can be sent to another pipeline stage."""

    def to_pp_tensors(self) -> Mapping[str, Tensor]:
        """Return the output's tensors by name; at least one."""


@runtime_checkable
class PipelineParallelSamplingObserver(Protocol):
    """A sampling observer that can make its output from tensors that came from another pipeline stage."""

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> DeviceAuxiliaryOutput:
        """Return the output whose `to_pp_tensors` gave `tensors`."""


def pp_tensors_of(output: DeviceAuxiliaryOutput) -> dict[str, Tensor]:
    """Return the tensors `output` sends, checked.

    Raises:
        RunError: no support for pipelines, no tensor, a name that is not a non-empty string, a value that is no tensor.
    """
    if not isinstance(output, PipelineParallelAuxiliaryOutput):
        raise RunError(
            "auxiliary output does not support pipeline-parallel transport: "
            f"{type(output).__name__} has no method to_pp_tensors"
        )
    tensors = dict(output.to_pp_tensors())
    if not tensors:
        raise RunError(f"auxiliary PP output must contain at least one tensor: {type(output).__name__} gave none")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name:
            raise RunError(f"auxiliary PP tensor names must be non-empty strings: found {name!r}")
        if not isinstance(tensor, Tensor):
            raise RunError(f"auxiliary PP output {name!r} is not a tensor: found {type(tensor).__name__}")
    return tensors
