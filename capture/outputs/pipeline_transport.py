"""Auxiliary outputs among the tensors that pipeline stages hand to each other.

The last rank adds, middle ranks pass the keys on untouched, the first rank pops.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...models.errors import RunError
from .composite import CompositeDeviceAuxiliaryOutput
from .contract import DeviceAuxiliaryOutput
from .pp_tensors import PipelineParallelSamplingObserver, pp_tensors_of

KEY_PREFIX = "__sampling_observer_output__."


def add_auxiliary_output_to_pp_tensors(tensors: MutableMapping[str, Any], output: DeviceAuxiliaryOutput | None) -> None:
    """Put the tensors of `output` into `tensors`; on an error, none of them. Do nothing where `output` is None.

    Raises:
        RunError: `output` cannot be sent, or one of its keys is taken.

    Example:
        >>> tensors = {"hidden_states": torch.zeros(1, 2, 4)}
        >>> add_auxiliary_output_to_pp_tensors(tensors, None)
        >>> sorted(tensors)
        ['hidden_states']
    """
    if output is None:
        return
    named = pp_tensors_of(output)
    for name in named:
        if KEY_PREFIX + name in tensors:
            raise RunError(f"duplicate auxiliary PP tensor {name!r}: the key {KEY_PREFIX + name!r} is taken")
    for name, tensor in named.items():
        tensors[KEY_PREFIX + name] = tensor


def pop_auxiliary_output_from_pp_tensors(
    tensors: MutableMapping[str, Any], observer: object | None
) -> DeviceAuxiliaryOutput | None:
    """Take the auxiliary output out of `tensors`, or return `None` where there is none. Other keys stay.

    Args:
        observer: rebuilds the output from its tensors (`from_pp_tensors`).

    Raises:
        RunError: no observer that can rebuild it, a value that is no tensor, or an observer that returned nothing;
            `tensors` is unchanged then.

    Example:
        >>> pop_auxiliary_output_from_pp_tensors({"hidden_states": torch.zeros(1, 2, 4)}, None) is None
        True
    """
    keys = [key for key in tensors if isinstance(key, str) and key.startswith(KEY_PREFIX)]
    if not keys:
        return None
    rebuild = _pipeline_observer(observer)
    named = {key.removeprefix(KEY_PREFIX): tensors[key] for key in keys}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise RunError(f"received a non-tensor auxiliary PP output: {name!r} is of type {type(tensor).__name__}")
    output: DeviceAuxiliaryOutput | None = rebuild.from_pp_tensors(named)
    if output is None:
        raise RunError(f"sampling observer did not reconstruct its PP output: {type(observer).__name__} returned None")
    for key in keys:
        del tensors[key]
    return output


@dataclass(frozen=True)
class _CompositePipelineObserver:
    """Rebuilds a composite: observer i makes the output of child i.

    `observers` are those whose outputs were sent, in the order in which they were appended.
    """

    observers: tuple[PipelineParallelSamplingObserver, ...]

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> CompositeDeviceAuxiliaryOutput:
        """Return the composite whose `to_pp_tensors` gave `tensors`.

        Raises:
            RunError: the tensors are not those of exactly one child per observer, or an observer returned nothing.
        """
        children: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            child, _, own_name = name.partition(".")
            children.setdefault(child, {})[own_name] = tensor
        expected = [str(index) for index in range(len(self.observers))]
        if sorted(children) != sorted(expected):
            raise RunError(
                f"received the auxiliary PP outputs {sorted(children)} for {len(self.observers)} sampling observers; "
                f"expected the outputs {expected}, one per observer that sent one."
            )
        return CompositeDeviceAuxiliaryOutput(
            tuple(_rebuilt(observer, children[child]) for observer, child in zip(self.observers, expected, strict=True))
        )


def pipeline_observer(
    observers: Sequence[PipelineParallelSamplingObserver],
) -> PipelineParallelSamplingObserver | None:
    """Return an observer that rebuilds the output that these, in this order, have sent; `None` without observers."""
    if len(observers) <= 1:
        return observers[0] if observers else None
    return _CompositePipelineObserver(tuple(observers))


def _pipeline_observer(observer: object | None) -> PipelineParallelSamplingObserver:
    if observer is None:
        raise RunError("received auxiliary PP output without a sampling observer")
    if not isinstance(observer, PipelineParallelSamplingObserver):
        raise RunError(
            "sampling observer does not support pipeline-parallel transport: "
            f"{type(observer).__name__} has no method from_pp_tensors"
        )
    return observer


def _rebuilt(observer: PipelineParallelSamplingObserver, tensors: Mapping[str, Tensor]) -> DeviceAuxiliaryOutput:
    output: DeviceAuxiliaryOutput | None = _pipeline_observer(observer).from_pp_tensors(tensors)
    if output is None:
        raise RunError(f"sampling observer did not reconstruct its PP output: {type(observer).__name__} returned None")
    return output
