"""Several auxiliary outputs of one step as one."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .commits import CommittedTokens
from .contract import CopyTensor, DeviceAuxiliaryOutput, HostAuxiliaryOutput
from .pp_tensors import pp_tensors_of
from .requests import Batch


@dataclass(frozen=True)
class CompositeHostAuxiliaryOutput:
    """Host outputs that share one step's batch and commits.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> states = DeviceHiddenStates({"aux_hidden_states": torch.zeros(2, 1, 4)}, RowLayout.of_prompts([2]))
        >>> host = append_auxiliary_output(None, states).copy_to_host(lambda tensor: tensor.cpu())
        >>> len(CompositeHostAuxiliaryOutput((host,)).outputs)
        1
    """

    outputs: tuple[HostAuxiliaryOutput, ...]

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Let every child consume the same `batch` and `commits`, in order.

        Raises:
            ExceptionGroup: at least one child raised; the others had their call all the same.
        """
        errors: list[Exception] = []
        for output in self.outputs:
            try:
                output.consume(batch, commits)
            except Exception as error:  # noqa: BLE001 - raised below, when the other children have had their call
                errors.append(error)
        if errors:
            raise ExceptionGroup(
                f"{len(errors)} of {len(self.outputs)} auxiliary outputs could not be consumed", errors
            )


@dataclass(frozen=True)
class CompositeDeviceAuxiliaryOutput:
    """Device outputs that are copied to the host together.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> layout = RowLayout.of_prompts([2])
        >>> states = DeviceHiddenStates({"aux_hidden_states": torch.zeros(2, 1, 4)}, layout)
        >>> norms = DeviceHiddenStates({"pre_norm": torch.zeros(2, 4)}, layout)
        >>> sorted(CompositeDeviceAuxiliaryOutput((states, norms)).copy_to_host(lambda tensor: tensor.cpu()).outputs[1].columns)
        ['pre_norm']
    """

    outputs: tuple[DeviceAuxiliaryOutput, ...]

    def copy_to_host(self, copy_tensor: CopyTensor) -> CompositeHostAuxiliaryOutput:
        """Copy every child once, in order."""
        return CompositeHostAuxiliaryOutput(tuple(output.copy_to_host(copy_tensor) for output in self.outputs))

    def to_pp_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of every child, child i's under the names `i.name`.

        Raises:
            RunError: a child does not support pipeline transport, or sends something else than named tensors.
        """
        return {
            f"{index}.{name}": tensor
            for index, output in enumerate(self.outputs)
            for name, tensor in pp_tensors_of(output).items()
        }


def append_auxiliary_output(
    current: DeviceAuxiliaryOutput | None, output: DeviceAuxiliaryOutput | None
) -> DeviceAuxiliaryOutput | None:
    """Append `output` to `current` and return one flat composite; if one of them is `None`, return the other itself.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> layout = RowLayout.of_prompts([2])
        >>> states = DeviceHiddenStates({"aux_hidden_states": torch.zeros(2, 1, 4)}, layout)
        >>> norms = DeviceHiddenStates({"pre_norm": torch.zeros(2, 4)}, layout)
        >>> len(append_auxiliary_output(states, norms).outputs)
        2
    """
    if current is None:
        return output
    if output is None:
        return current
    return CompositeDeviceAuxiliaryOutput((*_flat(current), *_flat(output)))


def _flat(output: DeviceAuxiliaryOutput) -> tuple[DeviceAuxiliaryOutput, ...]:
    if not isinstance(output, CompositeDeviceAuxiliaryOutput):
        return (output,)
    return tuple(leaf for child in output.outputs for leaf in _flat(child))
