"""Samples beside one model, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

from ...models.head import Head
from .chosen import ChosenSample
from .declared import Declaration, DeclaredTap, State
from .plain_forward import PlainForward, PlainStates
from .prediction import against_logits, predicting_tap
from .report import TapAgreement
from .values import ComparedTap, compare, judge_bits, judge_float32, judge_half
from .verdict import Verdict

_SAME_LIBRARIES = ("torch", "transformers")


@dataclass
class Comparison:
    """`add` samples, then `decide` what waits for float32; `verdicts` grows with both.

    half: whether the run computed in half precision. undecided: taps that differ by what may be rounding.
    """

    plain: PlainForward
    head: Head
    declarations: Mapping[Path, Declaration]
    half: bool
    compared: list[ComparedTap] = field(default_factory=list)
    undecided: list[ComparedTap] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, sample: ChosenSample) -> None:
        """Compare every tap of a sample with a plain forward, and the head's tokens with the model's."""
        taps = self.declarations[sample.shard.path].taps
        shown = self.plain(sample.input_ids)
        compared, verdicts = compare(sample, taps, shown.states, half=self.half)
        self.compared += compared
        self.verdicts += verdicts
        for one in compared:
            self._judge(one)
        self._predict(sample, taps, shown)

    def decide(self, in_float32: PlainForward) -> None:
        """Judge what is undecided beside forwards of the same weights in float32."""
        self.verdicts += judge_half(self.undecided, in_float32, bits_due=self._bits_due)

    def agreement(self) -> tuple[TapAgreement, ...]:
        """How near the stored rows came, by tap."""
        by_tap: dict[tuple[str, State], list[ComparedTap]] = {}
        for one in self.compared:
            by_tap.setdefault((one.tap.label, one.tap.state), []).append(one)
        return tuple(_agreement(label, state, group) for (label, state), group in by_tap.items())

    def _judge(self, one: ComparedTap) -> None:
        verdict = judge_bits(one, bits_due=self._bits_due(one))
        if verdict is None and bool(one.differing.any()):
            if self.half:
                self.undecided.append(one)
                return
            verdict = judge_float32(one, bits_due=self._bits_due(one))
        self.verdicts += [verdict] if verdict else []

    def _bits_due(self, one: ComparedTap) -> bool:
        """Whether the run promised the bits of a plain forward, and the libraries here are those that it used."""
        declaration = self.declarations[one.sample.shard.path]
        made_with = declaration.made_with
        return declaration.exact and all(made_with.get(name) == version(name) for name in _SAME_LIBRARIES)

    def _predict(self, sample: ChosenSample, taps: Sequence[DeclaredTap], shown: PlainStates) -> None:
        tap = predicting_tap(taps, self.plain.n)
        usable = self.head.norm is not None and self.head.lm_head is not None
        if usable and tap is not None and tap.state in shown.states and shown.logits is not None:
            verdict = against_logits(sample, tap, self.head, shown.states[tap.state], shown.logits)
            self.verdicts += [verdict] if verdict else []


def _agreement(label: str, state: State, group: Sequence[ComparedTap]) -> TapAgreement:
    errors = torch.cat([one.errors for one in group])
    equal = len(errors) - sum(int(one.differing.sum()) for one in group)
    return TapAgreement(label, str(state), len(errors), equal, float(errors.median()), float(errors.max()))
