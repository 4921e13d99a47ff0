"""One prompt on its way through generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...outputs import RowBuffer
from ..sampler.params import SamplingParams
from ..sampler.sampled_rows import RefusedToken
from ..sampler.sampling_info import SamplingState
from .finish import Finish, StopConditions
from .prompt_lookup import PromptLookup
from .prompts import Prompt

HIDDEN_COLUMNS = ("aux_hidden_states", "pre_norm", "post_norm")


class GenerationRequest:
    """A request: what was sampled for it, why it ended, and its rows.

    index: its place among the prompts.
    output_ids: every token that was accepted, those past a stop included; `finished_len` of them count.
    rows: its hidden states from position 0, what was sampled from position P-1 of a prompt of P tokens on.
    """

    def __init__(
        self, index: int, prompt: Prompt, params: SamplingParams, stops: StopConditions, *, looks_up: bool
    ) -> None:
        self.index, self.prompt, self.params = index, prompt, params
        self.rid = prompt.sample_id
        self.output_ids: list[int] = []
        self.finished_len: int | None = None
        self.aborted = False
        self.finish: Finish | None = None
        self.rows = self._no_rows()
        self._stops, self._looks_up = stops, looks_up

    # Made when the request first runs: of many requests only those under way need them.
    @cached_property
    def state(self) -> SamplingState:
        """Return the request as the sampler sees it."""
        return SamplingState.of(self.params, self.prompt.token_ids, self.output_ids)

    @cached_property
    def _lookup(self) -> PromptLookup | None:
        return PromptLookup(self.prompt.token_ids) if self._looks_up else None

    @property
    def P(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def R(self) -> int:
        """Rows it has: of the prompt, once all of that was run, and of each token but the last."""
        return 0 if self.aborted and not self.output_ids else self.P + max(len(self.token_ids) - 1, 0)

    @property
    def token_ids(self) -> list[int]:
        """Return the output that counts."""
        return self.output_ids[: self.finished_len]

    def draft(self, count: int) -> list[int]:
        """Return at most `count` draft tokens, no more than can be committed behind the one sampled."""
        if self._lookup is None:
            return []
        return self._lookup.draft(min(count, self._stops.max_new_tokens - len(self.output_ids) - 1))

    def abort(self) -> None:
        """Give it up; what was committed stays."""
        self.aborted, self.finish, self.finished_len = True, Finish("abort"), len(self.output_ids)

    def take(self, sampled: "SampledRun") -> int:
        """Accept what was sampled in a step, up to its first rejected draft token or refused token; returns how many tokens.

        The request ends where a token of them is its last, or at the refused one.
        """
        accepted = sampled.accepted
        refused = sampled.refused if sampled.refused is not None and sampled.refused.row < accepted else None
        tokens = sampled.token_ids[: accepted if refused is None else refused.row]
        for token in tokens:
            self.output_ids.append(token)
            if self.finish is None:
                self._finish(self._stops.finish_of(self.output_ids))
        if refused is not None and self.finish is None:
            self._finish(Finish("refused", refused.reason))
        if self._lookup is not None:
            self._lookup.extend(tokens)
        if len(tokens) < len(sampled.token_ids) and sampled.generator_before is not None:
            self.state.rewind(sampled.generator_before, len(tokens))
        return len(tokens)

    def release(self) -> None:
        """Let go of all but prompt and output: whoever was handed the request has stored its rows."""
        self.rows = self._no_rows()
        for name in ("state", "_lookup"):
            self.__dict__.pop(name, None)

    def _no_rows(self) -> RowBuffer:
        return RowBuffer(dict.fromkeys(HIDDEN_COLUMNS, 0), otherwise=self.P - 1)

    def _finish(self, finish: Finish | None) -> None:
        if finish is not None:
            self.finish, self.finished_len = finish, len(self.output_ids)


@dataclass(frozen=True)
class SampledRun:
    """Tokens that one step sampled for one request.

    token_ids: one per row; row j was sampled as if the first j draft tokens had come.
    draft: the draft tokens.
    refused: the first token that must not be committed.
    generator_before: state of the request's generator before the step; `None` where no number can be left over.
    """

    token_ids: Sequence[int]
    draft: Sequence[int] = ()
    refused: RefusedToken | None = None
    generator_before: Tensor | None = None

    @property
    def accepted(self) -> int:
        """Return how many tokens follow from each other: up to the first rejected draft token, with the token in its place."""
        right = [drafted == token for drafted, token in zip(self.draft, self.token_ids, strict=False)]
        return min((right.index(False) if False in right else len(right)) + 1, len(self.token_ids))


def last_token(request: GenerationRequest) -> int:
    """Return the token that the next step runs: the last one, of the prompt where nothing was sampled yet."""
    return request.output_ids[-1] if request.output_ids else request.prompt.token_ids[-1]


def ids_of(requests: Sequence[GenerationRequest]) -> Tensor:
    """Return (B, P) prompts of equal length."""
    return torch.tensor([request.prompt.token_ids for request in requests])
