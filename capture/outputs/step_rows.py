"""Named columns of the rows of one step, such as hidden states: copied to the host once, appended to the requests once."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...models.errors import RunError
from .commits import CommittedTokens
from .contract import CopyTensor
from .requests import Batch
from .row_layout import RowLayout


class DeviceStepRows:
    """Columns of one step on the device; emptied by their one copy to the host.

    columns: name to (T, ...), T rows in the layout's order.
    layout: whose rows these are.
    """

    def __init__(self, columns: Mapping[str, Tensor], layout: RowLayout) -> None:
        for name, column in columns.items():
            layout.check_column(name, column)
        self._columns: Mapping[str, Tensor] | None = MappingProxyType(dict(columns))
        self.layout = layout

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Return the device tensors by name.

        Raises:
            RunError: they were copied to the host and dropped.
        """
        if self._columns is None:
            raise RunError("these rows were copied to the host already; use what that copy returned.")
        return self._columns

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), None if self._columns is None else dict(self._columns), self.layout)

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostStepRows":
        """Pass each column through `copy_tensor` once, in the order of the columns, and drop the device tensors.

        Raises:
            RunError: called a second time.
        """
        return HostStepRows(self._copy_columns(copy_tensor), self.layout)

    def _copy_columns(self, copy_tensor: CopyTensor) -> dict[str, Tensor]:
        columns, self._columns = self.columns, None
        return {name: copy_tensor(column) for name, column in columns.items()}


class HostStepRows:
    """Columns of one step on the host; emptied by `consume`.

    columns: name to (T, ...), as on the device.
    layout: whose rows these are.
    """

    def __init__(self, columns: Mapping[str, Tensor], layout: RowLayout) -> None:
        self._columns: Mapping[str, Tensor] | None = MappingProxyType(dict(columns))
        self.layout = layout

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Return the host tensors by name.

        Raises:
            RunError: they were consumed.
        """
        if self._columns is None:
            raise RunError("these rows were consumed already; the output of a step is consumed once.")
        return self._columns

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), None if self._columns is None else dict(self._columns), self.layout)

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append to every request its prompt rows and the rows of its committed tokens; aborted requests get none.

        Raises:
            RunError: called a second time.
            UsageError: the layout, `batch.reqs` and `commits` speak of different numbers of requests.
        """
        self.layout.append_kept(self._take_columns(), batch, commits)

    def _take_columns(self) -> Mapping[str, Tensor]:
        columns, self._columns = self.columns, None
        return columns


def _restored(cls: Any, columns: dict[str, Tensor] | None, layout: RowLayout) -> Any:
    """Rebuild rows that were copied or pickled: the view of their columns cannot be."""
    if columns is not None:
        return cls(columns, layout)
    emptied = cls.__new__(cls)
    emptied._columns, emptied.layout = None, layout
    return emptied


class DeviceHiddenStates(DeviceStepRows):
    """Hidden states of one step on the device; emptied by its one copy to the host.

    Args:
        columns: `aux_hidden_states` (T, K, H) and, as asked, `pre_norm` and `post_norm` (T, H), `input_ids` (T,); states in the
            model's dtype.
        layout: the requests that the T rows belong to.

    Raises:
        UsageError: a column whose rows are not those of `layout`.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> states = DeviceHiddenStates({"aux_hidden_states": torch.zeros(5, 3, 8)}, RowLayout.of_prompts([2, 3]))
        >>> states.aux_hidden_states.shape, states.layout.row_counts
        (torch.Size([5, 3, 8]), (2, 3))
    """

    @property
    def aux_hidden_states(self) -> Tensor:
        """Return (T, K, H): the K captured boundaries of every row."""
        return self.columns["aux_hidden_states"]

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostHiddenStates":
        """Pass each column through `copy_tensor` once, in the order of the columns, and drop the device tensors.

        Raises:
            RunError: called a second time.
        """
        return HostHiddenStates(self._copy_columns(copy_tensor), self.layout)


class HostHiddenStates(HostStepRows):
    """Hidden states of one step on the host; `consume` appends them to the requests, once.

    Example:
        >>> from hiddentap.capture.outputs import RowLayout
        >>> states = DeviceHiddenStates({"aux_hidden_states": torch.zeros(5, 3, 8)}, RowLayout.of_prompts([2, 3]))
        >>> host = states.copy_to_host(lambda tensor: tensor.to("cpu"))
        >>> type(host).__name__, host.columns["aux_hidden_states"].shape
        ('HostHiddenStates', torch.Size([5, 3, 8]))
    """
