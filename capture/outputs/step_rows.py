"""Named columns of the rows of one step: copied to the host once, appended to the requests once."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

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
        """The device tensors by name.

        Raises:
            RunError: they were copied to the host and dropped.
        """
        if self._columns is None:
            raise RunError("these rows were copied to the host already; use what that copy returned.")
        return self._columns

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
        """The host tensors by name.

        Raises:
            RunError: they were consumed.
        """
        if self._columns is None:
            raise RunError("these rows were consumed already; the output of a step is consumed once.")
        return self._columns

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
