"""Sampling parameters of one request, and what is recorded of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ....models.errors import UsageError

LogitsProcessor: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`(input_ids (1, S) int64, scores (1, V) float32) -> scores (1, V)`; the processors of transformers are of this kind."""

GREEDY_BELOW = 1e-5
"""A temperature below this takes the likeliest token: dividing by it would leave the range of float32."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, validated on construction.

    Attributes:
        temperature: divides the logits; 0 (or below 1e-5) takes the most likely token.
        top_p: keep the most likely tokens that together reach this mass of the full distribution; 1 keeps all.
        top_k: keep the k most likely tokens, and those as likely as the k-th; 0 keeps all.
        min_p: drop tokens below this share of the most likely token's probability; 0 drops none.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 changes none.
        presence_penalty: subtracted once from the logit of every token in the output.
        frequency_penalty: subtracted from the logit of a token once per occurrence in the output.
        logit_bias: token id to the number that is added to its logit; `-inf` forbids it.
        seed: of this request's own random numbers; `None` takes a fresh one.
        max_new_tokens: output tokens after which the request ends.
        stop: texts that end the request once the output contains one.
        stop_token_ids: token ids that end the request, besides the model's own end tokens.
        ignore_eos: continue after the model's own end tokens.
        return_sampling_mask: record the support each token was sampled from, and its log-probability in it.
        return_logprob: record each token's log-probability under the model, before grammar, bias and temperature.
        top_logits: record this many of the largest logits of every sampled row; 0 records none.
        logits_processor: a grammar; sets the logits of tokens that may not come next to `-inf`.

    Raises:
        UsageError: a value out of range, or of a type that cannot be used.

    Example:
        >>> SamplingParams(temperature=0).is_greedy
        True
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    return_sampling_mask: bool = False
    return_logprob: bool = False
    top_logits: int = 0
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_bias()

    @property
    def is_greedy(self) -> bool:
        """Return whether decoding is greedy."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Return whether logits depend on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def _check_numbers(self) -> None:
        _require_number("temperature", self.temperature, self.temperature >= 0, "a number >= 0 (0 is greedy)")
        _require_number("top_p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1] (1 is off)")
        _require_number("min_p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1] (0 is off)")
        _require_number("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "a number > 0")
        _require_number("presence_penalty", self.presence_penalty, True, "a finite number")
        _require_number("frequency_penalty", self.frequency_penalty, True, "a finite number")
        _require_int("top_k", self.top_k, 0, "an integer >= 0 (0 is off)")
        _require_int("max_new_tokens", self.max_new_tokens, 1, "an integer >= 1")
        _require_int("top_logits", self.top_logits, 0, "an integer >= 0 (0 records none)")
        if self.seed is not None:
            _require_int("seed", self.seed, 0, "None or an integer in [0, 2**63)", 2**63)

    def _check_stops(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop must be a sequence of non-empty strings; found {self.stop!r}.")
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, "a sequence of token ids >= 0")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        for token, bias in self.logit_bias.items():
            _require_int("logit_bias", token, 0, "a mapping from token ids >= 0")
            if not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit_bias of token {token} must be a number or -inf; found {bias!r}.")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


def _require_number(name: str, value: float, holds: bool, expected: str) -> None:
    if not math.isfinite(value) or not holds:
        raise UsageError(f"{name} must be {expected}; found {value!r}.")


def _require_int(name: str, value: int, least: int, expected: str, below: int | None = None) -> None:
    plain = isinstance(value, int) and not isinstance(value, bool)
    if not plain or value < least or (below is not None and value >= below):
        raise UsageError(f"{name} must be {expected}; found {value!r}.")
