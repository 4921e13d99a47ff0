"""Commits: the tokens of a request that became visible in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...models.errors import RunError, UsageError
from .requests import Batch, Request, is_aborted, name_of


@dataclass(frozen=True)
class CommittedTokens:
    """Tokens of one request that became visible in one step.

    Attributes:
        output_index: output tokens that were visible before the step.
        token_ids: the tokens.

    Example:
        >>> CommittedTokens(output_index=3, token_ids=(42, 7)).token_ids
        (42, 7)
    """

    output_index: int
    token_ids: tuple[int, ...]


def visible_length(request: Request) -> int:
    """Return the number of output tokens a caller may see: the finished length once there is one, else all of them."""
    return len(request.output_ids) if request.finished_len is None else request.finished_len


def commits_of_step(batch: Batch, starts: Sequence[int]) -> list[CommittedTokens | None]:
    """Return the tokens that each request of `batch` gained since `starts`, its visible lengths before the step.

    `None` stands for a request that gained nothing (a middle chunk of a prompt, one that had finished before) and for
    one that was aborted.

    Raises:
        UsageError: `starts` and `batch.reqs` differ in length.
        RunError: a visible length is smaller than before, or lies beyond the tokens that exist.
    """
    if len(batch.reqs) != len(starts):
        raise UsageError(
            f"one start per request is due: found {len(starts)} starts for {len(batch.reqs)} requests; "
            "note the visible length of every request of the batch before the step."
        )
    return [_commit(request, start) for request, start in zip(batch.reqs, starts, strict=True)]


def _commit(request: Request, start: int) -> CommittedTokens | None:
    if is_aborted(request):
        return None
    end = visible_length(request)
    if end < start:
        raise RunError(f"committed output length moved backwards: request {name_of(request)} had {start}, now {end}")
    if end > len(request.output_ids):
        raise RunError(
            f"request {name_of(request)} is finished at length {end} but has {len(request.output_ids)} output tokens; "
            "the finished length counts output tokens."
        )
    if end == start:
        return None
    return CommittedTokens(output_index=start, token_ids=tuple(request.output_ids[start:end]))
