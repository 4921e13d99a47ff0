"""What an auxiliary output needs to know of a batch, its requests and the place their rows go to."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

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
        """The request's id, for messages."""

    @property
    def output_ids(self) -> Sequence[int]:
        """Every token sampled so far, those past a stop included."""

    @property
    def finished_len(self) -> int | None:
        """How many output tokens the finished request has; `None` while it runs."""

    @property
    def aborted(self) -> bool:
        """Whether the request was given up; none of its rows are kept then."""

    @property
    def rows(self) -> RowSink:
        """Where the rows of this request go."""


class Batch(Protocol):
    """The requests of one step."""

    @property
    def reqs(self) -> Sequence[Request]:
        """The requests, in the order of their rows."""
