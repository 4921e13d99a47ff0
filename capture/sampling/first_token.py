"""The first output token of a request, as a prefill process hands it to a decode process."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FirstToken:
    """The first output token and what was recorded of it; checked where it enters a slot, which is reset before that.

    token_id: the token.
    logprob: its log-probability; `None` where it was not asked for.
    top_logprobs, top_ids: the likeliest tokens' log-probabilities, and these tokens.
    wants_sampling_mask: whether the request asked for its sampling mask.
    sampling_mask: the support; `None` where there is none, which an empty one is not.
    sampling_logprob: log-probability in the support.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: Sequence[float] = ()
    top_ids: Sequence[int] = ()
    wants_sampling_mask: bool = False
    sampling_mask: Sequence[int] | None = None
    sampling_logprob: float | None = None
