"""Taps on a model compared with the record of every module: nothing, boundary by boundary, is taken on trust."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hiddentap.hooks import tap
from hiddentap.models.decoder import find_decoder
from hiddentap.models.errors import HiddentapError

from .recorder import Truth, equal, record, truth_of


def _streams(state: Tensor, axis: int, H: int) -> Tensor:
    return state.movedim(axis, 2) if state.ndim == 4 else state.unflatten(-1, (-1, H))


# What each adapter should give, made from what the record shows of a layer: state, pair of states, hidden width.
READINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "hyper_connections.mean": lambda state, H: _streams(state, 2, H).mean(2),
    "hyper_connections.streams": lambda state, H: _streams(state, 2, H).flatten(2),
    "altup.streams": lambda state, H: _streams(state, 0, H).flatten(2),
    "attention_residuals.prefix": lambda state, H: state,
    "tuple.first": lambda state, H: state,
    "next_input": lambda state, H: state,
}


@dataclass
class Comparison:
    """How the taps of one model compare with its record.

    Attributes:
        path, n: where the library found the layers, None where it did not.
        adapter: the adapter that the structure left no choice about.
        truth: what the record shows, None where the model does not run on token ids alone or no layers show in it.
        exact, wrong: boundaries whose tap gave, or did not give, the recorded bits.
        refused: boundaries without a tap, and why.
        norm: exact | wrong | none (the model has none and the library says so) | the refusal.
        adapters: names that refusals offer, and the comparison with each.
        failure: why the layers were not found, or why the model does not run.
    """

    path: str | None = None
    n: int | None = None
    adapter: str | None = None
    truth: Truth | None = None
    exact: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    norm: str = ""
    adapters: dict[str, Comparison] = field(default_factory=dict)
    failure: str | None = None


def compare(model: nn.Module, ids: Tensor) -> Comparison:
    """Record one forward of `model`, then tap every boundary and the norm, and compare bit for bit."""
    result = Comparison()
    try:
        decoder = find_decoder(model)
        result.path, result.n, result.adapter = decoder.layers_path, decoder.n, decoder.adapter_name
    except HiddentapError as refused:
        result.failure = str(refused)
    try:
        recorder, _ = record(model, ids, use_cache=False)
    except Exception as failed:  # noqa: BLE001 - whatever a model raises is its reason
        result.failure = result.failure or f"does not run on token ids alone: {type(failed).__name__}: {failed}"
        return result
    result.truth = truth_of(recorder)
    if result.truth is None or result.path is None:
        return result
    _compare_boundaries(result, model, ids, None)
    offered = sorted(
        {name for why in result.refused.values() for name in re.findall(r"[a-z_]+\.[a-z]+|next_input", why)}
    )
    for name in [n for n in offered if n in READINGS]:
        through = Comparison(path=result.path, n=result.n, truth=result.truth)
        _compare_boundaries(through, model, ids, name)
        result.adapters[name] = through
    return result


def _compare_boundaries(result: Comparison, model: nn.Module, ids: Tensor, adapter: str | None) -> None:
    truth = result.truth
    assert truth is not None
    assert result.n is not None
    for b in range(result.n + 1):
        try:
            with torch.no_grad(), tap(model, [b], "boundary", adapter=adapter) as t:
                got = t.run(ids).aux_hidden_states[0]
        except HiddentapError as refused:
            result.refused[b] = str(refused)
            continue
        expected = _expected(truth, b, adapter)
        right = bool(expected) and result.path == truth.path and all(equal(got, e) for e in expected)
        (result.exact if right else result.wrong).append(b)
    result.norm = _compare_norm(result, truth, model, ids, adapter)


def _expected(truth: Truth, b: int, adapter: str | None) -> list[Tensor]:
    """What boundary b must be: what leaves layer b-1 and what enters layer b, where both say the same."""
    leaves = truth.layer_out[b - 1] if b > 0 else None
    enters = truth.layer_in[b] if b < truth.n else None
    if adapter == "next_input" and enters is not None:
        leaves = None
    H = truth.width
    read = READINGS[adapter] if adapter is not None else (lambda state, _: state)
    return [read(state, H) for state in (leaves, enters) if state is not None]


def _compare_norm(result: Comparison, truth: Truth, model: nn.Module, ids: Tensor, adapter: str | None) -> str:
    usable = result.exact or [b for b in range(truth.n + 1) if b not in result.refused]
    if not usable:
        return ""
    try:
        with torch.no_grad(), tap(model, usable[:1], "boundary", final="both", adapter=adapter) as t:
            captured = t.run(ids)
    except HiddentapError as refused:
        no_norm = truth.post is None and "no final norm was found" in str(refused)
        return "none" if no_norm else str(refused)
    if truth.pre is None or truth.post is None or captured.pre_norm is None or captured.post_norm is None:
        return "wrong"
    right = equal(captured.pre_norm, truth.pre) and equal(captured.post_norm, truth.post)
    return "exact" if right else "wrong"
