"""Probes of a model's cached steps on a few tokens: which ways of running give the plain forward's rows.

A model is compared with itself: the same tokens in one plain forward without a cache. Some models of transformers give other
values in steps, or leave their cache alone, without an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ....hooks.rounding import computes_in_half, error_beyond_rounding
from ....models.call import few_ids
from ....models.errors import HiddentapError, RunError, UsageError
from ..kv_cache.cache import crop, known_layers
from ..kv_cache.held_positions import HeldPositions, can_line_up, kept, lined_up
from .cached_model import CachedModel, StepOutput

_S = 12


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

    @classmethod
    def joined(cls, parts: "Sequence[_Rows]") -> "_Rows":
        return cls({name: torch.cat([part.named[name] for part in parts]) for name in parts[0].named})

    def part(self, begin: int, end: int) -> "_Rows":
        return _Rows({name: rows[begin:end] for name, rows in self.named.items()})


class StepProbes:
    """Tries one model; to be used while its taps are attached."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self._ids = few_ids(model.model, model.tapped.decoder.vocab_rows, 2, _S)
        self._half = computes_in_half(model.model)
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
        self._compare(what, (_Rows.of(start), self._rows_of(0, 5)), (_Rows.of(rest), self._rows_of(7, _S)))

    def shares_steps(self, *, recording: bool) -> bool:
        """Return whether requests of different lengths can share a step of this model."""
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
        found: tuple[list[_Rows], list[_Rows]] = [], []
        for at in range(0, 4, S):
            ids = torch.stack([self._ids[0, 4 + at : 4 + at + S], self._ids[1, 7 + at : 7 + at + S]])
            step = _Rows.of(model.step(ids, held, S))
            for row in (0, 1):
                found[row].append(step.part(row * S, (row + 1) * S))
            held = lined_up([part for _, part in kept(held.grown(S), [0, 1], [0, 0])])
        # Each request by itself: the longest one is right in every company, and would hide the other in a common median.
        short, long = (_Rows.joined(rows) for rows in found)
        return self._beyond_rounding((long, self._rows_of(7, 11, [1])), (short, self._rows_of(4, 8, [0]))) is None

    def _require(self, what: str, edges: Sequence[int]) -> None:
        outputs = []
        with self._refusing(what):
            held = self._held()
            known_layers(held.cache)
            for begin, end in pairwise(edges):
                outputs.append(_Rows.of(self._model.step(self._ids[:, begin:end], held, end - begin)))
                held = held.grown(end - begin)
        expected = [self._rows_of(begin, end) for begin, end in pairwise(edges)]
        self._compare(what, (outputs[0], expected[0]), (_Rows.joined(outputs[1:]), _Rows.joined(expected[1:])))

    def _compare(self, what: str, *parts: "tuple[_Rows, _Rows]") -> None:
        worst = self._beyond_rounding(*parts)
        if worst is not None:
            name, error = worst
            raise StepError(
                f"{self._model.name} run {what} does not give what it gives in one plain forward: {name} differ by "
                f"{error:.2g} of their norm. This is the model's own code; generate and capture with another version of "
                "transformers, or take the output of its own generate() through an offline capture."
            )

    def _beyond_rounding(self, *parts: "tuple[_Rows, _Rows]") -> tuple[str, float] | None:
        """Return the name and error of the first value that differs by more than rounding, else None.

        parts: rows and expected ones; the first shows what rounding costs this model.
        """
        for name in parts[0][0].named:
            rows = ((found.named[name], expected.named[name]) for found, expected in parts)
            error = error_beyond_rounding(rows, half=self._half)
            if error is not None:
                return name, error
        return None

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
