"""Samples beside one model, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.head import Head
from .chosen import ChosenSample
from .declared import Declaration, DeclaredTap, State
from .forwards import InMemory, Lockstep
from .plain_forward import PlainForward, PlainStates
from .prediction import against_logits, is_whole, model_head, predicting_tap
from .report import TapAgreement
from .rounding import allowed_error
from .values import ComparedTap, compare, judge_bits, judge_float32, judge_half
from .verdict import Verdict

_SAME_LIBRARIES = ("torch", "transformers")
_installed = cache(version)  # parses a file on each call: half the time of verifying a small folder


@dataclass
class Comparison:
    """`add` some samples, then `decide` what waits for float32, and so on; `verdicts` grows with both.

    forwards: runs those of `plain`, whose model is `model`. stored_head: the one of the folder. half: whether the run computed
    in half precision. compared: called after each sample.
    """

    model: nn.Module
    plain: PlainForward
    forwards: InMemory | Lockstep
    stored_head: Head | None
    declarations: Mapping[Path, Declaration]
    half: bool
    compared: Callable[[ChosenSample], None]
    verdicts: list[Verdict] = field(default_factory=list)
    _undecided: list[ComparedTap] = field(default_factory=list)
    _errors: dict[tuple[str, State], list[Tensor]] = field(default_factory=dict)
    _differing: dict[tuple[str, State], int] = field(default_factory=dict)
    _allowed: dict[tuple[str, State], str] = field(default_factory=dict)

    @property
    def own_head(self) -> Head:
        """Return the head of the model."""
        return model_head(self.plain.norm, self.model)

    def add(self, samples: Sequence[ChosenSample]) -> None:
        """Compare every tap of each sample with a plain forward, and the head's tokens with the model's."""
        calls: list[Callable[[], None]] = [partial(self._add, sample) for sample in samples]
        if self.plain.source is None:
            calls.insert(0, partial(self.plain.probe, samples[0].input_ids))
        self.forwards(calls)

    def _add(self, sample: ChosenSample) -> None:
        taps = self.declarations[sample.name.path].comparable_taps
        shown = self.plain(sample.input_ids)
        compared, verdicts = compare(sample, taps, shown.states, half=self.half)
        self.verdicts += verdicts
        for one in compared:
            self._count(one)
            self._judge(one)
        self._predict(sample, taps, shown)
        self.compared(sample)

    def decide(self) -> None:
        """Judge what may be rounding of half precision, beside forwards of the same weights in float32."""
        if self._undecided:
            with self.forwards.in_float32():
                self.verdicts += judge_half(self._undecided, self.plain, self.forwards, bits_due=self._bits_due)
            self._undecided.clear()

    def agreement(self) -> tuple[TapAgreement, ...]:
        """Return how near the stored rows came, by tap."""
        found = []
        for (label, state), parts in self._errors.items():
            errors = torch.cat(parts)
            equal = len(errors) - self._differing[label, state]
            largest = float(errors.max())
            allowed = self._allowed[label, state]
            found.append(TapAgreement(label, str(state), len(errors), equal, float(errors.median()), largest, allowed))
        return tuple(found)

    def _count(self, one: ComparedTap) -> None:
        key = one.tap.label, one.tap.state
        self._errors.setdefault(key, []).append(one.errors)
        self._allowed[key] = allowed_error(one.stored.dtype, half=self.half, bits_due=self._bits_due(one))
        self._differing[key] = self._differing.get(key, 0) + int(one.differing.sum())

    def _judge(self, one: ComparedTap) -> None:
        verdict = judge_bits(one, bits_due=self._bits_due(one))
        if verdict is None and bool(one.differing.any()):
            if self.half:
                self._undecided.append(one)
                return
            verdict = judge_float32(one, bits_due=self._bits_due(one))
        self.verdicts += [verdict] if verdict else []

    def _bits_due(self, one: ComparedTap) -> bool:
        """Return whether the run promised the bits of a plain forward, and the libraries here are those that it used."""
        declaration = self.declarations[one.sample.name.path]
        made_with = declaration.made_with
        return declaration.exact and all(made_with.get(name) == _installed(name) for name in _SAME_LIBRARIES)

    def _predict(self, sample: ChosenSample, taps: Sequence[DeclaredTap], shown: PlainStates) -> None:
        tap = predicting_tap(taps, self.plain.n)
        if tap is None or tap.state not in shown.states or shown.logits is None or not is_whole(self.own_head):
            return
        own = self.own_head, shown.states[tap.state]
        verdict = against_logits(sample, tap, self.own_head, own, shown.logits)
        if verdict is not None:
            self.verdicts.append(verdict)
        elif self.stored_head is not None and is_whole(self.stored_head):
            # The model's own head makes the model's tokens of the same rows: the stored head is at fault, and no shard is.
            verdict = against_logits(sample, tap, self.stored_head, own, shown.logits)
            self.verdicts += [replace(verdict, of_head=True)] if verdict else []
