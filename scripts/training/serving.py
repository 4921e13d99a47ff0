"""Drafters served to their target: as trained, with the target's layers shifted, and untrained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging

from .acceptance import Acceptance, accepted, plain_greedy

AS_TRAINED = "as trained"

Counts = dict[tuple[str, str], Acceptance]


@dataclass(frozen=True)
class Serving:
    """What is served.

    Attributes:
        target: folder or hub id of the model that verifies, and the dtype that all compute in.
        drafters: their folders.
        shifts: by how many layers each drafter is shifted, besides being served as trained and untrained; None: as trained only.
        max_new_tokens: of each answer.
    """

    target: str
    dtype: str
    drafters: tuple[Path, ...]
    shifts: tuple[int, ...] | None
    max_new_tokens: int


def measured(serving: Serving, prompts: Sequence[Tensor], processes: int) -> Iterator[Counts]:
    """What each prompt, (1, P), counts: {(way of serving, name of the drafter): its count}."""
    count = partial(count_prompt, serving)
    if processes == 1:
        yield from map(count, prompts)
        return
    # A step of one sequence is too small for several threads; prompts side by side take a core each.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(count, prompts)


def count_prompt(serving: Serving, prompt: Tensor) -> Counts:
    """Plain greedy decoding once, and every drafter in every way against it."""
    model, served = loaded(serving)
    plain = plain_greedy(model, prompt, serving.max_new_tokens)
    return {key: accepted(model, drafter, prompt, plain, serving.max_new_tokens) for key, drafter in served.items()}


@cache
def loaded(serving: Serving) -> tuple[Any, dict[tuple[str, str], Any]]:
    """The target and {(way of serving, name): drafter}, once in each process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, serving.dtype)
    served = {
        (way, folder.name): drafter
        for seed, folder in enumerate(serving.drafters)
        for way, drafter in ways(AutoModel.from_pretrained(folder, dtype=dtype).eval(), serving.shifts, seed)
    }
    return AutoModelForCausalLM.from_pretrained(serving.target, dtype=dtype).eval(), served


def ways(drafter: Any, shifts: Sequence[int] | None, seed: int) -> Iterator[tuple[str, Any]]:
    """The drafter as trained and, where shifts are given, shifted by each of them and untrained."""
    yield AS_TRAINED, drafter
    if shifts is not None:
        yield from ((f"layers {shift:+d}", shifted(drafter, shift)) for shift in shifts)
        yield "untrained", untrained(drafter, seed)


def shifted(drafter: Any, shift: int) -> Any:
    """The same weights, given the states of other layers; -1 stands for the embeddings."""
    other = deepcopy(drafter)
    other.config.target_layer_ids = [layer + shift for layer in drafter.config.target_layer_ids]
    return other


def untrained(drafter: Any, seed: int) -> Any:
    """The same class and sizes with random weights."""
    torch.manual_seed(seed)
    return type(drafter)(drafter.config).to(drafter.dtype).eval()
