"""What a model's cached steps can be trusted with, found by trying them on a few tokens.

A model is compared with itself: the same tokens in one plain forward without a cache. Some models of transformers give other
values in steps, or leave their cache alone, without an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...models.call import few_ids
from ...models.errors import HiddentapError, RunError, UsageError
from .cache import crop, known_layers
from .cached_model import CachedModel, StepOutput
from .held_positions import HeldPositions, can_line_up, kept, lined_up

_S = 12
_FLOAT32_TOLERANCE = 1e-3
"""Wrong steps are off by a tenth and more; chunked recurrences of right ones by up to 1e-4."""
_HALF_TOLERANCE = 0.15
"""Of the median row: single rows of right half-precision steps differ by up to 0.2, where a router flips."""


class StepError(RunError, UsageError):
    """A model whose cached steps are not what its plain forward gives, or that cannot do what was asked for."""

    exit_code = 2


@dataclass(frozen=True)
class _Rows:
    """Rows of logits and of hidden states, flat, by name."""

    named: dict[str, Tensor]

    @classmethod
    def of(cls, output: StepOutput) -> "_Rows":
        return cls({"logits": output.logits.flatten(0, 1), **{n: c.flatten(1) for n, c in output.columns.items()}})


class StepProbes:
    """Tries one model; to be used while its taps are attached."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self._ids = few_ids(model.model, model.decoder.vocab_rows, 2, _S)
        with self._refusing("in one forward"):
            self._plain = model.plain(self._ids)

    def require_cached_steps(self) -> None:
        """Raise StepError unless a prompt and single tokens behind it give what a plain forward gives."""
        self._require("token by token", [0, 5, *range(6, _S + 1)])

    def require_chunks(self) -> None:
        """Raise StepError unless a prompt in chunks gives what one forward gives."""
        self._require("in chunks of several tokens", [0, 4, 8, 11, _S])

    def require_crop(self) -> None:
        """Raise StepError unless several tokens can be run at once and the last of them taken back."""
        what = "with tokens taken back"
        with self._refusing(what):
            held = self._held(recording=True)
            start = self._model.step(self._ids[:, :5], held, 5)
            held = held.grown(5)
            wrong = self._ids.flip(1)[:, 5:8]
            self._model.step(torch.cat([self._ids[:, 5:7], wrong], dim=1), held, 5)
            held = HeldPositions(crop(held.cache, 3), (7, 7), 7)
            rest = self._model.step(self._ids[:, 7:], held, _S - 7)
        self._compare(what, start, self._rows_of(0, 5))
        self._compare(what, rest, self._rows_of(7, _S))

    def shares_steps(self, *, recording: bool) -> bool:
        """Whether requests of different lengths can share a step of this model."""
        try:
            return self._shares_steps(recording)
        except (HiddentapError, TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            return False

    def _shares_steps(self, recording: bool) -> bool:
        model, parts = self._model, []
        for row, length in enumerate((4, 7)):
            held = HeldPositions.nothing(model.new_cache(recording=recording), 1)
            if not can_line_up(held.cache):
                return False
            model.step(self._ids[row : row + 1, :length], held, 1)
            parts.append(held.grown(length))
        held = lined_up(parts)
        S = 2 if recording else 1
        for at in range(0, 4, S):
            ids = torch.stack([self._ids[0, 4 + at : 4 + at + S], self._ids[1, 7 + at : 7 + at + S]])
            found = _Rows.of(model.step(ids, held, S))
            expected = [self._rows_of(4 + at, 4 + at + S, [0]), self._rows_of(7 + at, 7 + at + S, [1])]
            joined = {name: torch.cat([rows.named[name] for rows in expected]) for name in found.named}
            if _worst(found, _Rows(joined)) is not None:
                return False
            held = lined_up([part for _, part in kept(held.grown(S), [0, 1], [0, 0])])
        return True

    def _require(self, what: str, edges: Sequence[int]) -> None:
        outputs = []
        with self._refusing(what):
            held = self._held()
            known_layers(held.cache)
            for begin, end in pairwise(edges):
                outputs.append(self._model.step(self._ids[:, begin:end], held, end - begin))
                held = held.grown(end - begin)
        for output, (begin, end) in zip(outputs, pairwise(edges), strict=True):
            self._compare(what, output, self._rows_of(begin, end))

    def _compare(self, what: str, found: StepOutput, expected: _Rows) -> None:
        worst = _worst(_Rows.of(found), expected)
        if worst is not None:
            name, error = worst
            raise StepError(
                f"{self._model.name} run {what} does not give what it gives in one plain forward: {name} differ by "
                f"{error:.2g} of their norm. This is the model's own code; generate and capture with another version of "
                "transformers, or take the output of its own generate() through an offline capture."
            )

    def _rows_of(self, begin: int, end: int, rows: Sequence[int] = (0, 1)) -> _Rows:
        index = [row * _S + position for row in rows for position in range(begin, end)]
        return _Rows({name: tensor[index] for name, tensor in _Rows.of(self._plain).named.items()})

    def _held(self, *, recording: bool = False) -> HeldPositions:
        return HeldPositions.nothing(self._model.new_cache(recording=recording), 2)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turn whatever a model raises when it is run so into a refusal that names it."""
        try:
            yield
        except (HiddentapError, TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise StepError(
                f"{self._model.name} cannot be run {what} on a key-value cache: {type(error).__name__}: {error}"
            ) from error


def _worst(found: _Rows, expected: _Rows) -> tuple[str, float] | None:
    """The name and error of what is off by more than rounding; None where nothing is."""
    for name, rows in found.named.items():
        difference = (rows.double() - expected.named[name].double()).norm(dim=1)
        errors = difference / expected.named[name].double().norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        single = rows.dtype in (torch.float32, torch.float64)
        error = float(errors.max() if single else errors.median())
        if not error <= (_FLOAT32_TOLERANCE if single else _HALF_TOLERANCE):
            return name, error
    return None
