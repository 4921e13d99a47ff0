"""Hidden states as an auxiliary output."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from ...models.errors import RunError
from .commits import CommittedTokens
from .contract import CopyTensor
from .requests import Batch
from .row_layout import RowLayout


class DeviceHiddenStates:
    """Hidden states of one step on the device; emptied by its one copy to the host.

    columns: name to (T, ...), T rows in the layout's order: `aux_hidden_states` (T, K, H) and, as asked, `pre_norm` and
        `post_norm` (T, H), `input_ids` (T,).
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
            raise RunError("these hidden states were copied to the host already; use what that copy returned.")
        return self._columns

    @property
    def aux_hidden_states(self) -> Tensor:
        """(T, K, H): the K captured boundaries of every row."""
        return self.columns["aux_hidden_states"]

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostHiddenStates":
        """Pass each column through `copy_tensor` once, in the order of the columns, and drop the device tensors.

        Raises:
            RunError: called a second time.
        """
        columns, self._columns = self.columns, None
        return HostHiddenStates({name: copy_tensor(column) for name, column in columns.items()}, self.layout)


class HostHiddenStates:
    """Hidden states of one step on the host; emptied by `consume`.

    columns: name to (T, ...), as in `DeviceHiddenStates`.
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
            raise RunError("these hidden states were consumed already; each step's output is consumed once.")
        return self._columns

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append to every request its prompt rows and the rows of its committed tokens; aborted requests get none.

        Raises:
            RunError: called a second time.
            UsageError: the layout, `batch.reqs` and `commits` speak of different numbers of requests.
        """
        columns, self._columns = self.columns, None
        self.layout.append_kept(columns, batch, commits)
