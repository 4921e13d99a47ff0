"""Why a request ended, and the conditions that end it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .params import SamplingParams

FinishKind: TypeAlias = Literal["stop_token", "stop_string", "length", "abort", "refused"]


@dataclass(frozen=True)
class Finish:
    """Why a request ended.

    kind: `stop_token` and `stop_string` (the last token is or completes it), `length` (of the output, or of what the model can
        take), `abort`, or `refused`: the token that came next must not be committed.
    detail: the stop string, or the reason of a refusal.
    """

    kind: FinishKind
    detail: str | None = None


Decode: TypeAlias = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class StopConditions:
    """What ends one request.

    token_ids: tokens that end it.
    strings: texts that end it once the output contains one.
    max_new_tokens: tokens after which it ends.
    decode: token ids to text; needed for strings alone.
    """

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    max_new_tokens: int
    decode: Decode | None

    @classmethod
    def of(
        cls, params: SamplingParams, end_token_ids: frozenset[int], most: int, decode: Decode | None
    ) -> "StopConditions":
        """The conditions of a request in a model with these end tokens and room for `most` new tokens."""
        ends = frozenset() if params.ignore_eos else end_token_ids
        limit = min(params.max_new_tokens, most)
        return cls(ends | frozenset(params.stop_token_ids), tuple(params.stop), limit, decode)

    def finish_of(self, output_ids: Sequence[int]) -> Finish | None:
        """Whether the last of these tokens ends the request; to be asked after each token."""
        if output_ids[-1] in self.token_ids:
            return Finish("stop_token")
        if self.strings and self.decode is not None:
            text = self.decode(output_ids[-self._window :])
            found = next((stop for stop in self.strings if stop in text), None)
            if found is not None:
                return Finish("stop_string", found)
        return Finish("length") if len(output_ids) >= self.max_new_tokens else None

    @property
    def _window(self) -> int:
        # Every token has a byte of text at least; a few more, as the first of a text may lose the space in front of it.
        return max(len(stop.encode()) for stop in self.strings) + 4
