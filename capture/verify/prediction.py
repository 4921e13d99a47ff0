"""A check that final norm and lm_head predict the sample's tokens from its stored rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...models.head import Head
from .chosen import ChosenSample, SampleName
from .declared import DeclaredTap, State
from .matching import SHIFTS, Match
from .norm_state import has_left
from .verdict import Verdict, mismatch

# Most rows of a sample that are turned into logits; V can be 250,000.
ROWS_PREDICTED = 512
# Share of rows whose likeliest token must be the model's: rounding in half precision swaps near ties. Of few rows, less.
AGREEMENT, AGREEMENT_ERRORS = 0.9, 3.0
# What a row shift must gain in the mean log-probability of the next token, and in standard errors of that gain.
LEAST_GAIN, GAIN_ERRORS = 0.1, 4.0
# How little it must leave of a uniform guess's surprise. A model that has learnt nothing tells nothing (with tied embeddings it
# names its own input, as if rows were shifted); SmolLM2 on conversations is left with 0.35.
MOST_SURPRISE = 0.6


@dataclass(frozen=True)
class Prediction:
    """Predictions of one sample's tokens from its rows.

    state: what they are by their own look: the declared state, or the other side of the norm.
    log_probs: by row shift, (T,) of the token that follows, if row t were the row t + shift.
    hits: (T,) bool, whether the likeliest token is the one that follows.
    """

    sample: SampleName
    tap: DeclaredTap
    state: State
    log_probs: Mapping[int, Tensor]
    hits: Tensor
    vocabulary: int


def predicting_tap(taps: Iterable[DeclaredTap], n: int) -> DeclaredTap | None:
    """Return the tap that the head can be put on: pre-norm, else boundary n, else post-norm."""
    able = [tap for tap in taps if tap.state in (State(n), State(n, normed=True))]
    return min(able, key=lambda tap: (tap.state.normed, tap.slot is not None), default=None)


@torch.inference_mode()
def logits_of(head: Head, rows: Tensor, *, normed: bool) -> Tensor:
    """Return (T, V) on the CPU: of rows (T, H), through the norm unless they are `normed`."""
    norm, lm_head = _parts(head)
    hidden = _on_head(lm_head, rows)
    logits: Tensor = lm_head(hidden if normed else norm(hidden))
    return logits.float().cpu()


def against_logits(
    sample: ChosenSample, tap: DeclaredTap, head: Head, own: tuple[Head, Tensor], logits: Tensor
) -> Verdict | None:
    """Return whether `head` on the stored rows and the model name the same likeliest tokens.

    own: the model's head and its state (S, H) that `tap` declares; logits: (S, V), the model's. Where these two do not give
    the model's tokens either (a model that changes its states before the lm_head), nothing can be said.
    """
    expected = logits[:ROWS_PREDICTED].argmax(-1).cpu()
    least = AGREEMENT - AGREEMENT_ERRORS * math.sqrt(AGREEMENT * (1 - AGREEMENT) / len(expected))
    if _agreement(own[0], own[1][:ROWS_PREDICTED], tap, expected) < least:
        return None
    share = _agreement(head, tap.rows(sample.columns)[:ROWS_PREDICTED], tap, expected)
    if share >= least:
        return None
    what = f"final norm and lm_head on stored {tap.label} predict other tokens than the model"
    return Verdict(sample.name, tap, what, f"in {1 - share:.0%} of the rows")


def predict(sample: ChosenSample, tap: DeclaredTap, head: Head) -> Prediction | None:
    """Return how well the stored rows predict tokens, shifted and not; None for a sample of fewer than four tokens."""
    ids = sample.input_ids[: ROWS_PREDICTED + 3].long()
    T = len(ids) - 3
    if T < 1:
        return None
    norm, lm_head = _parts(head)
    rows = tap.rows(sample.columns)[1 : T + 1]
    normed = has_left(norm, _on_head(lm_head, rows))
    state = tap.state if normed is None else State(tap.state.boundary, normed)
    logits = logits_of(head, rows, normed=state.normed)
    following = {shift: ids[2 + shift : 2 + shift + T] for shift in SHIFTS}
    log_softmax = logits.log_softmax(-1)
    log_probs = {shift: log_softmax.gather(-1, token[:, None])[:, 0] for shift, token in following.items()}
    return Prediction(sample.name, tap, state, log_probs, logits.argmax(-1) == following[0], logits.shape[-1])


def judge_predictions(predictions: Sequence[Prediction]) -> list[Verdict]:
    """Rows that look like the other side of the norm are that; a shift that predicts the text clearly better is theirs."""
    if not predictions:
        return []
    shift = _best_shift(predictions)
    return [
        Verdict(p.sample, p.tap, mismatch(p.tap, Match(p.state, shift, False, 0.0)), "as the head and the text show")
        for p in predictions
        if (p.state, shift) != (p.tap.state, 0)
    ]


def in_words(predictions: Sequence[Prediction]) -> str | None:
    """Return how well the declared reading predicts the text."""
    if not predictions:
        return None
    tap = predictions[0].tap
    hits = torch.cat([p.hits for p in predictions])
    mean = float(torch.cat([p.log_probs[0] for p in predictions]).mean())
    uniform = -math.log(predictions[0].vocabulary)
    return (
        f"{tap.label} through the head names the next token in {float(hits.double().mean()):.1%} of {len(hits)} rows "
        f"(log-probability {mean:.2f}; a uniform guess {uniform:.2f})"
    )


def model_head(norm: nn.Module | None, model: nn.Module) -> Head:
    """Return the head of a loaded model."""
    output = getattr(model, "get_output_embeddings", None)
    return Head(norm, output() if callable(output) else None, None)


def _best_shift(predictions: Sequence[Prediction]) -> int:
    joined = {shift: torch.cat([p.log_probs[shift] for p in predictions]) for shift in SHIFTS}
    best = max(SHIFTS, key=lambda shift: float(joined[shift].mean()))
    gain = joined[best] - joined[0]
    surprise = -float(joined[best].mean()) / math.log(predictions[0].vocabulary)
    least = max(LEAST_GAIN, GAIN_ERRORS * float(gain.std(correction=0)) / math.sqrt(len(gain)))
    return best if float(gain.mean()) > least and surprise <= MOST_SURPRISE else 0


def _agreement(head: Head, rows: Tensor, tap: DeclaredTap, expected: Tensor) -> float:
    return float((logits_of(head, rows, normed=tap.state.normed).argmax(-1) == expected).double().mean())


def _parts(head: Head) -> tuple[nn.Module, nn.Module]:
    if head.norm is None or head.lm_head is None:
        raise ValueError("the head has no final norm or no lm_head; ask `is_whole` first")
    return head.norm, head.lm_head


def is_whole(head: Head) -> bool:
    """Return whether rows can be put through it."""
    return head.norm is not None and head.lm_head is not None


def _on_head(lm_head: nn.Module, rows: Tensor) -> Tensor:
    weight = next(lm_head.parameters())
    return rows.to(weight.device, weight.dtype)
