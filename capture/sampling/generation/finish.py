"""The end of a request: its stop conditions, an abort from outside, and the reason."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..sampler.params import SamplingParams

FinishKind: TypeAlias = Literal["stop_token", "stop_string", "length", "abort", "refused"]


@dataclass(frozen=True)
class Finish:
    """The reason that a request ended.

    kind: `stop_token` and `stop_string` (the last token is or completes it), `length` (of the output, or of what the model can
        take), `abort`, or `refused`: the token that came next must not be committed.
    detail: the stop string, or the reason of a refusal.
    """

    kind: FinishKind
    detail: str | None = None


Decode: TypeAlias = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class StopConditions:
    """Stop conditions of one request.

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
        """Return the conditions of a request in a model with these end tokens and room for `most` new tokens."""
        ends = frozenset() if params.ignore_eos else end_token_ids
        limit = min(params.max_new_tokens, most)
        return cls(ends | frozenset(params.stop_token_ids), tuple(params.stop), limit, decode)

    def finish_of(self, output_ids: Sequence[int]) -> Finish | None:
        """Return whether the last of these tokens ends the request; call it after each token."""
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


class Aborts:
    """Abort requests of a running generation from anywhere: an observer, a callback, another thread.

    An aborted request keeps the tokens and rows that were committed before; nothing of the current step is committed for it.

    Example:
        >>> aborts = Aborts()
        >>> aborts.abort(0)
        >>> [result] = generate_with_capture(model, [[5, 6, 7]], SamplingParams(), layer_ids=[1], aborts=aborts)
        >>> result.finish_reason
        'abort'
    """

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._lock = threading.Lock()

    def abort(self, index: int) -> None:
        """Abort request `index`, counted from 0 among the prompts; do nothing if it has ended."""
        with self._lock:
            self._asked.add(index)

    def __contains__(self, index: int) -> bool:
        with self._lock:
            return index in self._asked
