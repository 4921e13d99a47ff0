"""The places of each request's rows in the tensors of one step, and which rows are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ...models.errors import RunError, UsageError
from .commits import CommittedTokens
from .requests import Batch, RangeSink, Request, Rows, is_aborted


@dataclass(frozen=True)
class KeptRows:
    """The rows of one request that outlive the step: `rows` of the batch tensor, from position `first_position` on."""

    request: Request
    first_position: int
    rows: slice


@dataclass(frozen=True)
class RowLayout:
    """The rows of every request of one step.

    row_counts: rows of each request; 0 is allowed.
    first_positions: position, in its request, of each request's first row.
    prompt_counts: how many of each request's rows, its first ones, are prompt rows: kept, whatever is committed.
    row_starts: row of the batch tensor where each request begins; `None` when they lie one after the other.
    """

    row_counts: tuple[int, ...]
    first_positions: tuple[int, ...]
    prompt_counts: tuple[int, ...]
    row_starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        lengths = [len(self.row_counts), len(self.first_positions), len(self.prompt_counts), len(self.starts)]
        if len(set(lengths)) > 1:
            raise UsageError(
                "a row layout needs one row count, first position, prompt count and row start per request; "
                f"found {lengths} of them."
            )
        for index, (count, position, prompt) in enumerate(
            zip(self.row_counts, self.first_positions, self.prompt_counts, strict=True)
        ):
            if count < 0 or position < 0 or not 0 <= prompt <= count:
                raise UsageError(
                    f"request {index} has {count} rows from position {position}, {prompt} of them prompt rows; "
                    "expected no negative number and at most as many prompt rows as rows."
                )
        self._check_rows_apart()

    @classmethod
    def of_prompts(cls, row_counts: Sequence[int], first_positions: Sequence[int] | None = None) -> "RowLayout":
        """Prompt rows alone, one request after the other, from position 0 unless other positions are given."""
        counts = tuple(row_counts)
        positions = (0,) * len(counts) if first_positions is None else tuple(first_positions)
        return cls(counts, positions, counts)

    @classmethod
    def of_verify_step(
        cls, stride: int | None, accept_lengths: Sequence[int], first_positions: Sequence[int]
    ) -> "RowLayout":
        """Return a verify step of speculative decoding: request i owns rows `i*stride ... i*stride + accept_lengths[i] - 1`.

        Raises:
            RunError: the step has no positive stride, or a request accepted more rows than it owns.
        """
        if stride is None or stride <= 0:
            raise RunError(f"speculative result is missing a positive output row stride: found {stride}")
        for index, accepted in enumerate(accept_lengths):
            if accepted > stride:
                raise RunError(
                    f"request {index} accepted {accepted} rows of a step that has {stride} rows per request."
                )
        return cls(
            tuple(accept_lengths),
            tuple(first_positions),
            (0,) * len(accept_lengths),
            tuple(index * stride for index in range(len(accept_lengths))),
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """Row of the batch tensor where each request begins."""
        if self.row_starts is not None:
            return self.row_starts
        return tuple(accumulate(self.row_counts, initial=0))[:-1]

    def check_column(self, name: str, column: Rows) -> None:
        """Refuse a column that does not hold the rows of this layout.

        Raises:
            UsageError: with another number of rows than the layout's, or too few for its row starts.
        """
        found = 0 if isinstance(column, Tensor) and column.dim() == 0 else len(column)
        needed = max((start + count for start, count in zip(self.starts, self.row_counts, strict=True)), default=0)
        if found < needed or (self.row_starts is None and found > needed):
            raise UsageError(
                f"column {name!r} needs {needed} rows, those of {len(self.row_counts)} requests; found {found}."
            )

    def kept_rows(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> list[KeptRows]:
        """Return the rows to keep: prompt rows, then as many of the others as tokens were committed; of aborted requests none.

        Raises:
            UsageError: the layout, `batch.reqs` and `commits` speak of different numbers of requests.
        """
        if not len(batch.reqs) == len(commits) == len(self.row_counts):
            raise UsageError(
                "one request and one commit per entry of the row layout are due: found "
                f"{len(self.row_counts)} entries, {len(batch.reqs)} requests and {len(commits)} commits."
            )
        kept = []
        for index, (request, commit, start) in enumerate(zip(batch.reqs, commits, self.starts, strict=True)):
            count = 0 if is_aborted(request) else self._kept_count(index, commit)
            if count:
                kept.append(KeptRows(request, self.first_positions[index], slice(start, start + count)))
        return kept

    def append_kept(self, columns: Mapping[str, Rows], batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append the kept rows of every column to the requests they belong to; as one range where the batch takes that."""
        all_kept = self.kept_rows(batch, commits)
        if isinstance(batch, RangeSink) and self._are_everything(all_kept):
            batch.append_all(columns)
            return
        for kept in all_kept:
            kept.request.rows.append(kept.first_position, {name: column[kept.rows] for name, column in columns.items()})

    def _are_everything(self, kept: Sequence[KeptRows]) -> bool:
        """Return whether every row of the step is kept, each request's from its position 0 on."""
        rows = sum(one.rows.stop - one.rows.start for one in kept)
        return self.row_starts is None and rows == sum(self.row_counts) and not any(self.first_positions)

    def _kept_count(self, index: int, commit: CommittedTokens | None) -> int:
        prompt = self.prompt_counts[index]
        others = self.row_counts[index] - prompt
        committed = 0 if commit is None else len(commit.token_ids)
        return prompt + min(others, committed)

    def _check_rows_apart(self) -> None:
        end = 0
        for index, (start, count) in enumerate(zip(self.starts, self.row_counts, strict=True)):
            if start < end:
                raise UsageError(
                    f"request {index} begins at row {start}, inside the rows before it, which end at {end}."
                )
            end = start + count
