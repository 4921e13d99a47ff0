"""The two halves of one auxiliary output: tensors made on the device, and the same tensors on the host."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from .commits import CommittedTokens
from .requests import Batch

CopyTensor: TypeAlias = Callable[[Tensor], Tensor]
"""Takes a device tensor, queues its copy, returns the host tensor; that one can be read after the step's wait."""


@runtime_checkable
class HostAuxiliaryOutput(Protocol):
    """Host tensors of one step, waiting for the tokens that the step commits.

    Example:
        >>> class Counted:
        ...     rows = 0
        ...
        ...     def consume(self, batch, commits):
        ...         self.rows += sum(len(commit.token_ids) for commit in commits if commit is not None)
        >>> isinstance(Counted(), HostAuxiliaryOutput)
        True
    """

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Hand the rows to the requests; called exactly once, after the commit and before anything is returned.

        `commits` is aligned with `batch.reqs`; `None` where the request gained no visible token.
        """


@runtime_checkable
class DeviceAuxiliaryOutput(Protocol):
    """Device tensors of one step, made along with the model's own output.

    No tensor aliases a buffer that a later forward can overwrite: a static buffer of a CUDA graph, the output of a
    layer that reuses it, a residual stream that is added to in place. The copy to the host relies on it.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> states = DeviceHiddenStates({"aux_hidden_states": torch.zeros(2, 1, 4)}, RowLayout.of_prompts([2]))
        >>> isinstance(states, DeviceAuxiliaryOutput)
        True
    """

    def copy_to_host(self, copy_tensor: CopyTensor) -> HostAuxiliaryOutput:
        """Pass every tensor through `copy_tensor` exactly once, for the whole batch, and drop the device tensors."""
