"""What an accelerator does while a run captures: busy and idle time, synchronisations, copies; and steps of a generation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hiddentap.capture.run.pacing.budget import TokenBudget
from hiddentap.capture.sampling import SamplingParams, generate_with_capture
from hiddentap.capture.store import Plan

from .figures import Figure
from .rounds import Contender, Stopwatch, run_rounds
from .samples import DATA_SETS
from .setting import Setting
from .speed import FALLBACK_BATCH_TOKENS
from .this_project import Hiddentap, batches, write_plan

TOKENS, QUICK_TOKENS = 65_536, 1_024
TOP_LOGITS = 16
NEW_TOKENS, QUICK_NEW_TOKENS, PROMPTS = 128, 8, 8
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TO_HOST = {"pinned": "Memcpy DtoH (Device -> Pinned)", "pageable": "Memcpy DtoH (Device -> Pageable)"}


def device(setting: Setting) -> list[Figure]:
    """A run with taps, and one with top logits, beside the bare forward; a profile of the run on an accelerator."""
    size = setting.batch_tokens or FALLBACK_BATCH_TOKENS
    figures = []
    for name in setting.data_sets:
        samples = DATA_SETS[name](QUICK_TOKENS if setting.quick else TOKENS, setting.vocabulary)
        with setting.scratch() as folder:
            plan = write_plan(folder / "plan", samples, 1)
            figures += _of_plan(setting, plan, folder / "out", name, size)
    return figures


def generation(setting: Setting) -> list[Figure]:
    """Tokens a second of greedy generation, captured and not, of eight prompts of 64 tokens side by side."""
    count = QUICK_NEW_TOKENS if setting.quick else NEW_TOKENS
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, setting.vocabulary, 64).tolist() for _ in range(PROMPTS)]
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    layers = {"generation, captured": setting.chosen_layers, "generation, not captured": ()}
    contenders = [Contender(what, partial(_generate, setting, prompts, params, ids)) for what, ids in layers.items()]
    taken = run_rounds("generation", contenders, setting.rounds)
    new = count * PROMPTS
    return [
        Figure("generation", what, "prompts of 64", "tokens/s", tuple(new / seconds for seconds in of.values()))
        for what, of in taken.items()
    ]


def _generate(setting: Setting, prompts: list[list[int]], params: SamplingParams, layers: tuple[int, ...]) -> float:
    watch = Stopwatch(setting.source.torch_device)
    with watch.running():
        generate_with_capture(setting.loaded.model, prompts, params, layer_ids=layers, max_batch=PROMPTS)
    return watch.seconds


def _of_plan(setting: Setting, plan: Plan, out: Path, name: str, size: int) -> list[Figure]:
    tapped = Hiddentap(setting.loaded, setting.asked())
    with_logits = Hiddentap(setting.loaded, setting.asked(top_logits=TOP_LOGITS))
    contenders = [
        Contender("bare forward", partial(tapped.bare_forwards, plan, size, compiled=False)),
        Contender("taps, copy and disk", partial(_run, tapped, plan, out, size)),
        Contender(f"the same with top {TOP_LOGITS} logits", partial(_run, with_logits, plan, out, size)),
    ]
    for contender in contenders:
        contender.run()  # the first of each kind allocates
    taken = run_rounds(f"device, {name}", contenders, setting.rounds)
    figures = [
        Figure("device", what, name, "tokens/s", tuple(plan.R / seconds for seconds in of.values()))
        for what, of in taken.items()
    ]
    floor = taken["bare forward"]
    for what, of in taken.items():
        if of is not floor:
            figures.append(
                Figure("device", f"time, {what} / bare forward", name, "x", tuple(of[i] / floor[i] for i in of))
            )
    if tapped.device.type == "cuda":
        figures += _profiled(tapped, plan, out, name, size)
    return figures


def _run(ours: Hiddentap, plan: Plan, out: Path, size: int) -> float:
    return ours.run(plan, out, TokenBudget.fixed(size), compiled=False).seconds


def _profiled(ours: Hiddentap, plan: Plan, out: Path, name: str, size: int) -> list[Figure]:
    """Of one run: the part of its time in which no kernel and no copy ran, and per batch the host's waits and the copies."""
    count = sum(1 for _ in batches(plan, size))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        _run(ours, plan, out, size)
    events: list[Any] = list(profiled.events() or ())
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_device)
    waits = sum(event.name in WAITS for event in events)
    figures = [
        Figure("device", "host waits for the device, per batch", name, "per batch", (waits / count,)),
        *(
            Figure("device", f"copies to {kind} memory, per batch", name, "per batch", (copies / count,))
            for kind, label in TO_HOST.items()
            for copies in [sum(event.name == label for event in on_device)]
        ),
    ]
    if spans:
        whole = max(end for _, end in spans) - spans[0][0]
        idle = 100 * (1 - busy_time(spans) / whole)
        figures.append(Figure("device", "idle between its first and its last work", name, "%", (idle,)))
    return figures


def busy_time(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much of time `spans` cover, each (start, end), sorted by start; what runs side by side counts once."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
