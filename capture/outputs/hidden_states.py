"""Hidden states as an auxiliary output."""

from torch import Tensor

from .contract import CopyTensor
from .step_rows import DeviceStepRows, HostStepRows


class DeviceHiddenStates(DeviceStepRows):
    """Hidden states of one step on the device; emptied by its one copy to the host.

    Args:
        columns: `aux_hidden_states` (T, K, H) and, as asked, `pre_norm` and `post_norm` (T, H), `input_ids` (T,).
        layout: whose rows these are.
    """

    @property
    def aux_hidden_states(self) -> Tensor:
        """(T, K, H): the K captured boundaries of every row."""
        return self.columns["aux_hidden_states"]

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostHiddenStates":
        """Pass each column through `copy_tensor` once, in the order of the columns, and drop the device tensors.

        Raises:
            RunError: called a second time.
        """
        return HostHiddenStates(self._copy_columns(copy_tensor), self.layout)


class HostHiddenStates(HostStepRows):
    """Hidden states of one step on the host; `consume` appends them to the requests, once."""
