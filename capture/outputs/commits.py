"""Which tokens of a request became visible in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...models.errors import RunError, UsageError
from .requests import Batch, Request


@dataclass(frozen=True)
class CommittedTokens:
    """Tokens of one request that became visible in one step.

    `output_index` is the number of output tokens that were visible before the step.
    """

    output_index: int
    token_ids: tuple[int, ...]


def visible_length(request: Request) -> int:
    """The number of output tokens a caller may see: the finished length once there is one, else all of them."""
    return len(request.output_ids) if request.finished_len is None else request.finished_len


def commits_of_step(batch: Batch, starts: Sequence[int]) -> list[CommittedTokens | None]:
    """What each request of `batch` gained since `starts`, the visible lengths noted before the step.

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
    if request.aborted:
        return None
    end = visible_length(request)
    if end < start:
        raise RunError(f"committed output length moved backwards: request {request.rid!r} had {start}, now {end}")
    if end > len(request.output_ids):
        raise RunError(
            f"request {request.rid!r} is finished at length {end} but has {len(request.output_ids)} output tokens; "
            "the finished length counts output tokens."
        )
    if end == start:
        return None
    return CommittedTokens(output_index=start, token_ids=tuple(request.output_ids[start:end]))
