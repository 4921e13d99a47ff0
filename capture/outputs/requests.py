"""The interfaces that an auxiliary output needs: a batch, its requests, and where their rows go."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from .ragged_rows import RaggedRows

Rows: TypeAlias = Tensor | RaggedRows
"""r rows of one column: a tensor (r, ...), or r lists."""


class RowSink(Protocol):
    """The place where the rows of one request are kept."""

    def append(self, first_position: int, rows: Mapping[str, Rows]) -> None:
        """Add rows of named columns, the first of them at `first_position`; row t belongs to position t.

        The values are views that hold during the call only: a sink that keeps them copies them.

        Raises:
            ValueError: the rows leave a gap in a column or overlap what it has; the positions are named.
        """


class Request(Protocol):
    """One prompt on its way through generation, or one sample of an offline run."""

    @property
    def rid(self) -> str:
        """Return the request's id, for messages."""

    @property
    def output_ids(self) -> Sequence[int]:
        """Every token sampled so far, those past a stop included."""

    @property
    def finished_len(self) -> int | None:
        """Return how many output tokens the finished request has; `None` while it runs."""

    @property
    def rows(self) -> RowSink:
        """The destination of this request's rows."""


def is_aborted(request: Request) -> bool:
    """Return whether the request was given up, so that none of its rows are kept: its `aborted`, where it has that."""
    return bool(getattr(request, "aborted", False))


def name_of(request: Request) -> str:
    """Return what messages call the request: its `rid`, where it has one."""
    return repr(getattr(request, "rid", None))


class Batch(Protocol):
    """The requests of one step."""

    @property
    def reqs(self) -> Sequence[Request]:
        """Return the requests, in the order of their rows."""


@runtime_checkable
class RangeSink(Protocol):
    """A batch whose requests' rows are neighbors in one place, so that all of a step can be kept as one range."""

    def append_all(self, rows: Mapping[str, Rows]) -> None:
        """Add the rows of every request, from its position 0 on, in the order of `reqs`.

        The values hold during the call only, as those of `RowSink.append`.
        """
