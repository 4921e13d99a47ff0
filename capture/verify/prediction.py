"""Whether final norm and lm_head make of stored rows what a language model makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...models.head import Head
from .chosen import ChosenSample
from .declared import DeclaredTap, State
from .matching import SHIFTS, Match
from .verdict import Verdict, mismatch

# Most rows of a sample that are turned into logits; V can be 250,000.
ROWS_PREDICTED = 512
# Share of rows whose likeliest token must be the model's: rounding in half precision swaps near ties. Of few rows, less.
AGREEMENT, AGREEMENT_ERRORS = 0.9, 3.0
# What another reading must gain in the mean log-probability of the next token, and in standard errors of that gain.
LEAST_GAIN, GAIN_ERRORS = 0.1, 4.0
# How much better than a uniform guess it must be: a model that predicts nothing tells nothing.
LEAST_KNOWLEDGE = 0.5


@dataclass(frozen=True)
class Prediction:
    """What the rows of one sample predict of its tokens.

    log_probs: (T,) by reading: of the token that follows, if row t were the row t + shift of that state.
    hits: (T,) bool: the likeliest token is the one that follows, under the declared reading.
    """

    sample: ChosenSample
    tap: DeclaredTap
    log_probs: Mapping[tuple[State, int], Tensor]
    hits: Tensor
    vocabulary: int


def predicting_tap(taps: Iterable[DeclaredTap], n: int) -> DeclaredTap | None:
    """The tap that the head can be put on: pre-norm, else boundary n, else post-norm."""
    able = [tap for tap in taps if tap.state in (State(n), State(n, normed=True))]
    return min(able, key=lambda tap: (tap.state.normed, tap.slot is not None), default=None)


@torch.inference_mode()
def logits_of(head: Head, rows: Tensor, *, normed: bool) -> Tensor:
    """(T, V) on the CPU: of rows (T, H), through the norm unless they are `normed`."""
    if head.norm is None or head.lm_head is None:
        raise ValueError("the head has no final norm or no lm_head")
    weight = next(head.lm_head.parameters())
    hidden = rows.to(weight.device, weight.dtype)
    logits: Tensor = head.lm_head(hidden if normed else head.norm(hidden))
    return logits.float().cpu()


def against_logits(
    sample: ChosenSample, tap: DeclaredTap, head: Head, own_state: Tensor, logits: Tensor
) -> Verdict | None:
    """Whether stored rows and the model's own have the same likeliest tokens.

    own_state: (S, H), the model's state that `tap` declares; logits: (S, V), the model's. Where head and own state do not give
    the model's tokens either (a model that changes its states before the lm_head), nothing can be said.
    """
    expected = logits[:ROWS_PREDICTED].argmax(-1).cpu()
    least = AGREEMENT - AGREEMENT_ERRORS * math.sqrt(AGREEMENT * (1 - AGREEMENT) / len(expected))
    normed = tap.state.normed
    if _agreement(logits_of(head, own_state[:ROWS_PREDICTED], normed=normed), expected) < least:
        return None
    share = _agreement(logits_of(head, tap.rows(sample.columns)[:ROWS_PREDICTED], normed=normed), expected)
    if share >= least:
        return None
    what = f"final norm and lm_head on stored {tap.label} predict other tokens than the model"
    return Verdict(sample, tap, what, f"in {1 - share:.0%} of the rows")


def predict(sample: ChosenSample, tap: DeclaredTap, head: Head) -> Prediction | None:
    """What the stored rows predict under every reading: with and without the norm, shifted or not."""
    ids = sample.input_ids[: ROWS_PREDICTED + 2].long()
    T = len(ids) - 3
    if T < 1:
        return None
    rows, n = tap.rows(sample.columns)[1 : T + 1], tap.state.boundary
    log_probs: dict[tuple[State, int], Tensor] = {}
    hits = torch.zeros(T, dtype=torch.bool)
    vocabulary = 0
    for state in (State(n), State(n, normed=True)):
        logits = logits_of(head, rows, normed=state.normed).log_softmax(-1)
        vocabulary = logits.shape[-1]
        for shift in SHIFTS:
            following = ids[2 + shift : 2 + shift + T]
            log_probs[state, shift] = logits.gather(-1, following[:, None])[:, 0]
        if state == tap.state:
            hits = logits.argmax(-1) == ids[2 : 2 + T]
    return Prediction(sample, tap, log_probs, hits, vocabulary)


def judge_predictions(predictions: Sequence[Prediction]) -> list[Verdict]:
    """A reading that predicts the tokens clearly better than the declared one is what the rows are."""
    if not predictions:
        return []
    joined = {reading: torch.cat([p.log_probs[reading] for p in predictions]) for reading in predictions[0].log_probs}
    tap = predictions[0].tap
    best = max(joined, key=lambda reading: float(joined[reading].mean()))
    gain = joined[best] - joined[tap.state, 0]
    known = float(joined[best].mean()) + math.log(predictions[0].vocabulary)
    least = max(LEAST_GAIN, GAIN_ERRORS * float(gain.std(correction=0)) / math.sqrt(len(gain)))
    if float(gain.mean()) <= least or known < LEAST_KNOWLEDGE:
        return []
    what = f"{mismatch(tap, Match(best[0], best[1], False, 0.0))} (so the head predicts the text best)"
    return [Verdict(prediction.sample, tap, what) for prediction in predictions]


def in_words(predictions: Sequence[Prediction]) -> str | None:
    """How well the declared reading predicts the text."""
    if not predictions:
        return None
    tap = predictions[0].tap
    hits = torch.cat([p.hits for p in predictions])
    mean = float(torch.cat([p.log_probs[tap.state, 0] for p in predictions]).mean())
    uniform = -math.log(predictions[0].vocabulary)
    return (
        f"{tap.label} through the head names the next token in {float(hits.double().mean()):.1%} of {len(hits)} rows "
        f"(log-probability {mean:.2f}; a uniform guess {uniform:.2f})"
    )


def model_head(norm: nn.Module | None, model: nn.Module) -> Head:
    """The head of a loaded model."""
    output = getattr(model, "get_output_embeddings", None)
    return Head(norm, output() if callable(output) else None, None)


def _agreement(logits: Tensor, expected: Tensor) -> float:
    return float((logits.argmax(-1) == expected).double().mean())
