"""Tokens per second: the floor, this project's run, and other tools' strategies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hiddentap.capture.run.pacing.budget import TokenBudget
from hiddentap.capture.store import Plan

from . import other_tools
from .figures import Figure, in_order, ratios
from .other_process import OtherProcess, other_process
from .rounds import Contender, run_rounds, tell
from .samples import DATA_SETS, Samples
from .setting import SHARDS, Setting
from .this_project import Hiddentap, write_plan

# Enough for a run to try every size of batch that it considers, several times.
TRIAL_TOKENS, QUICK_TRIAL_TOKENS = 32_000, 1_000
FALLBACK_BATCH_TOKENS = 2048
OURS = {False: "hiddentap, eager", True: "hiddentap, compiled"}
FLOOR = {False: "floor, eager", True: "floor, compiled"}


@dataclass(frozen=True)
class Prepared:
    """One data set as a plan of the size that was asked for, and what was learnt on a first stretch of it.

    `batch_tokens`: by whether layers are compiled. `compile_seconds`: what the first compiled run took longer than the second.
    """

    samples: Samples
    plan: Plan
    batch_tokens: dict[bool, int]
    compile_seconds: float


def speed(setting: Setting) -> list[Figure]:
    """Every contender on each data set that was asked for."""
    ours = Hiddentap(setting.loaded, setting.asked())
    with other_process(setting.model, setting.dtype, ours.device) as others:
        return [figure for name in setting.data_sets for figure in _of_data_set(setting, ours, others, name)]


def _of_data_set(setting: Setting, ours: Hiddentap, others: OtherProcess, name: str) -> list[Figure]:
    with setting.scratch() as folder:
        prepared = prepare(setting, ours, name, folder)
        own = own_contenders(ours, prepared, folder / "out")
        strange = _other_contenders(setting, others, prepared.samples, folder)
        seconds = run_rounds(f"speed, {name}", [*own, *strange], setting.rounds)
    tokens = prepared.samples.tokens
    figures = [
        Figure("speed", who, name, "tokens/s", tuple(tokens / s for s in in_order(of))) for who, of in seconds.items()
    ]
    for compiled, our in OURS.items():
        what = f"time, {our} / {FLOOR[compiled]}"
        figures += ratios("speed", what, name, seconds[our], seconds[FLOOR[compiled]])
    for other in strange:
        for our in OURS.values():
            figures += ratios("speed", f"speed, {our} / {other.name}", name, other.seconds, seconds[our])
    for compiled, size in prepared.batch_tokens.items():
        figures.append(Figure("speed", f"positions of a batch, {OURS[compiled]}", name, "positions", (size,)))
    return [*figures, Figure("speed", "compiling, once", name, "s", (prepared.compile_seconds,))]


def prepare(setting: Setting, ours: Hiddentap, name: str, folder: Path) -> Prepared:
    """Tries sizes of batches and compiles on a first stretch of the data; then plans as much as fills the time asked for."""
    make, tokens = DATA_SETS[name], QUICK_TRIAL_TOKENS if setting.quick else TRIAL_TOKENS
    trial, out = write_plan(folder / "trial", make(tokens, setting.vocabulary), 1), folder / "out"
    batch_tokens: dict[bool, int] = {}
    for compiled in (False, True):
        fixed = setting.batch_tokens
        budget = TokenBudget.fixed(fixed) if fixed else TokenBudget.probing(ours.device)
        first = ours.run(trial, out, budget, compiled=compiled)
        batch_tokens[compiled] = first.batch_tokens or FALLBACK_BATCH_TOKENS
        second = ours.run(trial, out, TokenBudget.fixed(batch_tokens[compiled]), compiled=compiled)
        tell(f"speed, {name}: {OURS[compiled]}: {first} then {second} on {trial.R} tokens")
        if not compiled:
            per_token = second.seconds / trial.R
    samples = make(max(int(setting.seconds / per_token), 64), setting.vocabulary)
    plan = write_plan(folder / "plan", samples, SHARDS)
    return Prepared(samples, plan, batch_tokens, max(first.seconds - second.seconds, 0.0))


def own_contenders(ours: Hiddentap, prepared: Prepared, out: Path) -> list[Contender]:
    """The floor and this project's run, eager and compiled, each under the budget that its mode settled on."""
    contenders = []
    for compiled in (False, True):
        size = prepared.batch_tokens[compiled]
        floor = partial(ours.bare_forwards, prepared.plan, size, compiled=compiled)
        run = partial(_seconds_of_run, ours, prepared.plan, out, size, compiled=compiled)
        contenders += [Contender(FLOOR[compiled], floor), Contender(OURS[compiled], run)]
    return contenders


def _seconds_of_run(ours: Hiddentap, plan: Plan, out: Path, size: int, *, compiled: bool) -> float:
    return ours.run(plan, out, TokenBudget.fixed(size), compiled=compiled).seconds


def _other_contenders(setting: Setting, others: OtherProcess, samples: Samples, folder: Path) -> list[Contender]:
    about = (samples.ids, setting.chosen_layers, folder / "saved")
    return [Contender(name, partial(others.seconds, name, *about), setting.others_every) for name in other_tools.NAMES]
