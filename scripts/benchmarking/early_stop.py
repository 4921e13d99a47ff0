"""What it saves that a forward ends after the last layer that is wanted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hiddentap.capture.run.pacing.budget import TokenBudget
from hiddentap.capture.store import Plan

from .figures import Figure, in_order, ratios
from .rounds import Contender, run_rounds
from .samples import near
from .setting import SHARDS, Setting
from .speed import FALLBACK_BATCH_TOKENS
from .this_project import Hiddentap, write_plan

ALL = "all n layers"


def early_stop(setting: Setting) -> list[Figure]:
    """Runs with one tap and `--final none`, eager, on near lengths: after n/4, n/2, 3n/4 and all n layers."""
    n, size = setting.n, setting.batch_tokens or FALLBACK_BATCH_TOKENS
    depths = {"stop at n/4": n // 4, "stop at n/2": n // 2, "stop at 3n/4": 3 * n // 4, ALL: n}
    runs = {
        name: Hiddentap(setting.loaded, setting.asked(layer_ids=(max(depth, 1),), convention="boundary", final="none"))
        for name, depth in depths.items()
    }
    with setting.scratch() as folder:
        out, budget = folder / "out", TokenBudget.fixed
        trial = write_plan(folder / "trial", near(4 * size, setting.vocabulary), 1)
        seconds = min(runs[ALL].run(trial, out, budget(size), compiled=False).seconds for _ in range(2))
        samples = near(max(int(trial.R / seconds * setting.seconds), 64), setting.vocabulary)
        plan = write_plan(folder / "plan", samples, SHARDS)
        contenders = [Contender(name, partial(_seconds, run, plan, out, size)) for name, run in runs.items()]
        taken = run_rounds("early stop", contenders, setting.rounds)
    figures = [
        Figure("early stop", name, "near", "tokens/s", tuple(samples.tokens / s for s in in_order(of)))
        for name, of in taken.items()
    ]
    for name in depths:
        if name != ALL:
            figures += ratios("early stop", f"time, {name} / {ALL}", "near", taken[name], taken[ALL])
    return figures


def _seconds(run: Hiddentap, plan: Plan, out: Path, size: int) -> float:
    return run.run(plan, out, TokenBudget.fixed(size), compiled=False).seconds
