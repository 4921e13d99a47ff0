"""Which operations the floor spends its time in: what no tool around the model can make shorter."""

from __future__ import annotations

from torch.profiler import profile

from hiddentap.capture.store import Plan

from .figures import Figure
from .samples import DATA_SETS
from .setting import Setting
from .speed import FALLBACK_BATCH_TOKENS
from .this_project import Hiddentap, write_plan

TOKENS, QUICK_TOKENS = 8_192, 1_024
SHOWN = 5


def operations(setting: Setting) -> list[Figure]:
    """Shares of the floor's time, eager, on both data sets; of the device's time on an accelerator."""
    ours = Hiddentap(setting.loaded, setting.asked())
    size = setting.batch_tokens or FALLBACK_BATCH_TOKENS
    figures = []
    for name, make in DATA_SETS.items():
        with setting.scratch() as folder:
            samples = make(QUICK_TOKENS if setting.quick else TOKENS, setting.vocabulary)
            plan = write_plan(folder / "plan", samples, 1)
            ours.bare_forwards(plan, size, compiled=False)
            shares = _shares(ours, plan, size)
        figures += [Figure("operations", f"part of the floor in {what}", name, "%", (part,)) for what, part in shares]
    return figures


def _shares(ours: Hiddentap, plan: Plan, size: int) -> list[tuple[str, float]]:
    """The operations that take most of the time themselves, with their part of the whole in per cent."""
    on_host = ours.device.type == "cpu"
    with profile() as profiled:
        ours.bare_forwards(plan, size, compiled=False)
    own = {
        event.key: event.self_cpu_time_total if on_host else event.self_device_time_total
        for event in profiled.key_averages()
    }
    whole = sum(own.values())
    longest = sorted(own, key=lambda key: -own[key])[:SHOWN]
    return [(key.removeprefix("aten::"), 100 * own[key] / whole) for key in longest]
