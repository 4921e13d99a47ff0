"""Stored rows beside those of plain forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .chosen import ChosenSample, SampleName
from .declared import DeclaredTap, State
from .forwards import InMemory, Lockstep
from .matching import Match, closest_other, differing_rows, is_better, match_of, row_errors
from .plain_forward import PlainForward
from .rounding import FLOAT32_LIMIT, NARROWED_LIMIT, exceeds_rounding, lost_rows
from .verdict import Verdict, mismatch

OTHER = "different weights or data"


@dataclass(frozen=True)
class ComparedTap:
    """One tap of one sample beside the declared state.

    stored, single: (S, H) of the stored dtype, on the CPU; single: of a plain forward in the dtype the run computed in.
    errors, differing: (S,) row errors between them, and which rows are not bit-equal.
    closest: the best match other than the declared state; better: whether the rows are that instead.
    """

    sample: ChosenSample
    tap: DeclaredTap
    stored: Tensor
    single: Tensor
    errors: Tensor
    differing: Tensor
    closest: Match | None
    better: bool

    def verdict(self, what: str, detail: str = "") -> Verdict:
        return Verdict(self.sample.name, self.tap, what, detail)


def compare(
    sample: ChosenSample, taps: Iterable[DeclaredTap], states: Mapping[State, Tensor], *, half: bool
) -> tuple[list[ComparedTap], list[Verdict]]:
    """Compare the taps of one sample with the states of a plain forward; a tap without such a state has a verdict."""
    compared, verdicts = [], []
    on_host: dict[torch.dtype, dict[State, Tensor]] = {}
    for tap in taps:
        stored = tap.rows(sample.columns)
        if stored.dtype not in on_host:
            on_host[stored.dtype] = {name: state.to("cpu", stored.dtype) for name, state in states.items()}
        alike = on_host[stored.dtype]
        single = alike.get(tap.state)
        if single is None or single.shape != stored.shape:
            found = "nothing" if single is None else f"rows of {single.shape[-1]}"
            detail = f"the model shows {found} for {tap.state}"
            what = f"{tap.label} has nothing to be compared with"
            verdicts.append(Verdict(sample.name, tap, what, detail, "warning"))
            continue
        closest = closest_other(stored, alike, tap.state)
        better = closest is not None and is_better(closest, match_of(stored, tap.state, single), half=half)
        errors, differing = row_errors(stored, single), differing_rows(stored, single)
        compared.append(ComparedTap(sample, tap, stored, single, errors, differing, closest, better))
    return compared, verdicts


def judge_bits(compared: ComparedTap, *, bits_due: bool) -> Verdict | None:
    """Return the finding that needs no bound of rounding; None if there is none."""
    if compared.closest is not None and compared.better:
        return compared.verdict(mismatch(compared.tap, compared.closest))
    wrong = compared.differing
    if bits_due and bool(wrong.any()) and int(wrong.sum()) * 2 <= len(wrong):
        # Another processor rounds all rows its own way; where most are equal the others were changed.
        return changed_rows(compared, wrong, compared.errors)
    return None


def judge_float32(compared: ComparedTap, *, bits_due: bool) -> Verdict | None:
    """Judge rows that were computed in float32 and have no better match."""
    limit = FLOAT32_LIMIT if compared.stored.dtype == torch.float32 else NARROWED_LIMIT
    wrong = compared.errors > limit
    if int(wrong.sum()) * 2 > len(wrong):
        return other(compared, compared.errors)
    if bool(wrong.any()):
        return changed_rows(compared, wrong, compared.errors)
    return not_bit_equal(compared) if bits_due and bool(compared.differing.any()) else None


def judge_half(
    open_taps: Iterable[ComparedTap],
    in_float32: PlainForward,
    forwards: InMemory | Lockstep,
    *,
    bits_due: Callable[[ComparedTap], bool],
) -> list[Verdict]:
    """Judge rows of half precision that differ from a single forward and have no better match."""
    verdicts: list[Verdict] = []
    by_tap: dict[DeclaredTap, list[tuple[ComparedTap, Tensor, Tensor]]] = {}

    def against_truth(sample_taps: Sequence[ComparedTap]) -> None:
        states = in_float32(sample_taps[0].sample.input_ids).states
        for compared in sample_taps:
            truth = states[compared.tap.state].float().cpu()
            errors = row_errors(compared.stored, truth), row_errors(compared.single, truth)
            by_tap.setdefault(compared.tap, []).append((compared, *errors))

    forwards([partial(against_truth, sample_taps) for sample_taps in _by_sample(open_taps)])
    for group in by_tap.values():
        found = [
            verdict for compared, stored, single in group if (verdict := _beyond_rounding(compared, stored, single))
        ]
        together = exceeds_rounding(torch.cat([e for _, e, _ in group]), torch.cat([e for _, _, e in group]))
        if together and not found:
            found = [compared.verdict(OTHER, f"over all compared samples {together}") for compared, _, _ in group]
        if not found:
            found = [not_bit_equal(compared) for compared, _, _ in group if bits_due(compared)]
        verdicts += found
    return verdicts


def changed_rows(compared: ComparedTap, wrong: Tensor, errors: Tensor) -> Verdict:
    detail = (
        f"{int(wrong.sum())} of its {len(wrong)} rows, first at token {int(wrong.nonzero()[0])}, "
        f"by up to {float(errors[wrong].max()):.2g} of their length; the other rows are right"
    )
    return compared.verdict(f"rows of {compared.tap.label} are not {compared.tap.state} of the model", detail)


def other(compared: ComparedTap, errors: Tensor, how: str = "") -> Verdict:
    error, closest = float(errors.median()), compared.closest
    parts = [f"a row of {compared.tap.label} differs from {compared.tap.state} by {error:.2g} of its length (median)"]
    if closest is not None and closest.error < error:
        shift = f" with rows shifted by {closest.shift:+d}" if closest.shift else ""
        parts.append(f"the closest is {closest.state}{shift}, {closest.error:.2g} away")
    else:
        parts.append("no other state is closer")
    return compared.verdict(OTHER, "; ".join([*parts, how] if how else parts))


def not_bit_equal(compared: ComparedTap) -> Verdict:
    detail = (
        f"{int(compared.differing.sum())} of {len(compared.differing)} rows of {compared.tap.label} differ, by up to "
        f"{float(compared.errors.max()):.2g} of their length: another processor rounds otherwise, or they were changed"
    )
    return Verdict(compared.sample.name, compared.tap, "an exact run, but not bit-equal here", detail, "warning")


def _beyond_rounding(compared: ComparedTap, stored: Tensor, single: Tensor) -> Verdict | None:
    too_far = exceeds_rounding(stored, single)
    lost = lost_rows(stored, single)
    if bool(lost.any()) and int(lost.sum()) * 2 <= len(lost):
        return changed_rows(compared, lost, stored)
    return other(compared, compared.errors, too_far) if too_far else None


def _by_sample(compared: Iterable[ComparedTap]) -> list[list[ComparedTap]]:
    groups: dict[SampleName, list[ComparedTap]] = {}
    for one in compared:
        groups.setdefault(one.sample.name, []).append(one)
    return list(groups.values())
