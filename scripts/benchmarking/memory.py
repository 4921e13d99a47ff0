"""Peaks of memory above the loaded model, each in a process of its own, and what the model and a batch's states take."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hiddentap.capture.run import capture_dataset
from hiddentap.capture.run.engines.hugging_face import backend as hugging_face_backend
from hiddentap.capture.run.pacing.budget import TokenBudget
from hiddentap.models.loaded_model import LoadedModel
from hiddentap.models.model_source import ModelSource

from . import other_tools
from .figures import Figure, ratios
from .rounds import tell
from .samples import Samples, near, tiny
from .setting import Setting
from .speed import FALLBACK_BATCH_TOKENS, OURS
from .this_project import Hiddentap, write_plan

TOKENS, QUICK_TOKENS = 16_384, 1_024
COUNTS, QUICK_COUNTS = (100, 1_000, 10_000), (10, 100, 1_000)
GROWTH_BATCH_TOKENS = 1_024
TIMES = 3


@dataclass(frozen=True)
class Peak:
    """Bytes above the loaded model, on the host and on the device, and the seconds of the work."""

    host: int
    device: int
    seconds: float = 0.0


class PeakSince:
    """Peaks since this was made: VmHWM less the resident size at the start, mapped file pages that came in since left out."""

    def __init__(self, model: nn.Module) -> None:
        # Weights may be mapped from their file: bring them in, so that they count as loaded.
        for parameter in model.parameters():
            parameter.sum()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()  # loading may have needed more than the weights take
        self._resident, self._mapped = _status("VmRSS"), _status("RssFile")
        self._device = _device_bytes()

    def above(self) -> Peak:
        mapped = max(_status("RssFile") - self._mapped, 0)
        return Peak(_status("VmHWM") - self._resident - mapped, _device_bytes(peak=True) - self._device)


def _status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


def _device_bytes(*, peak: bool = False) -> int:
    if not torch.accelerator.is_available():
        return 0
    return torch.accelerator.max_memory_allocated() if peak else torch.accelerator.memory_allocated()


def in_fresh_process(work: Callable[..., Peak], *args: Any) -> Peak:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def memory(setting: Setting) -> list[Figure]:
    """This project's run and other tools' strategies on the same samples of near lengths; weights and states to compare with.

    An accelerator's allocator gives the same peak every time: there, once is enough.
    """
    once = setting.quick or setting.source.torch_device.type != "cpu"
    times = 1 if once else min(setting.rounds, TIMES)
    whos = (OURS[False], other_tools.PADDED, other_tools.ONE_BY_ONE, other_tools.WITH_LOGITS)
    peaks: dict[str, list[Peak]] = {who: [] for who in whos}
    for number in range(times):
        for who in whos:
            peaks[who].append(in_fresh_process(_peak_of, _portable(setting), who))
            tell(f"memory, {number + 1} of {times}: {who}: {peaks[who][-1]}")
    return [
        *_sizes(setting),
        *(figure for who, found in peaks.items() for figure in _figures("memory", who, "near", found)),
    ]


def _sizes(setting: Setting) -> list[Figure]:
    """What peaks are to be compared with: the model's weights, and the states that a batch of hiddentap leaves at the taps."""
    model = setting.loaded.model
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    positions = setting.batch_tokens or FALLBACK_BATCH_TOKENS
    states = positions * (len(setting.chosen_layers) + 1) * setting.config.hidden_size * model.dtype.itemsize
    return [
        Figure("memory", "weights of the model", "near", "MB", (weights / 1e6,)),
        Figure("memory", f"states of a batch of {positions:,} positions", "near", "MB", (states / 1e6,)),
    ]


def growth(setting: Setting) -> list[Figure]:
    """The whole run, tokenizing and planning included, over 1, 10 and 100 times as many tiny samples."""
    counts, times = (QUICK_COUNTS, 1) if setting.quick else (COUNTS, min(setting.rounds, TIMES))
    peaks: dict[int, list[Peak]] = {count: [] for count in counts}
    for number in range(times):
        for count in counts:
            peaks[count].append(in_fresh_process(_peak_of_run, _portable(setting), count))
            tell(f"growth, {number + 1} of {times}: {count:,} samples: {peaks[count][-1]}")
    figures = []
    for count, found in peaks.items():
        figures += _figures("growth", f"{count:,} samples", "tiny", found)
        each = tuple(1000 * peak.seconds / count for peak in found)
        figures.append(Figure("growth", f"time of the run, {count:,} samples", "tiny", "ms a sample", each))
    hosts = {count: {i: float(peak.host) for i, peak in enumerate(found)} for count, found in peaks.items()}
    for count in counts[1:]:
        what = f"memory, {count:,} samples / {counts[0]:,} samples"
        figures += ratios("growth", what, "tiny", hosts[count], hosts[counts[0]])
    return figures


def _figures(section: str, who: str, data: str, peaks: Iterable[Peak]) -> list[Figure]:
    found = list(peaks)
    host = Figure(section, f"memory above the model, {who}", data, "MB", tuple(peak.host / 1e6 for peak in found))
    device = tuple(peak.device / 1e6 for peak in found)
    return [host, *([Figure(section, f"device memory, {who}", data, "MB", device)] if any(device) else [])]


def _portable(setting: Setting) -> Setting:
    """Without what it has loaded."""
    return replace(setting)


def _peak_of(setting: Setting, who: str) -> Peak:
    with setting.scratch() as folder:
        if who == OURS[False]:
            ours = Hiddentap(setting.loaded, setting.asked())
            plan = write_plan(folder / "plan", _samples(setting), 1)
            budget = TokenBudget.fixed(setting.batch_tokens or FALLBACK_BATCH_TOKENS)
            since = PeakSince(setting.loaded.model)
            ours.run(plan, folder / "out", budget, compiled=False)
            return since.above()
        layers, samples = setting.chosen_layers, _samples(setting)
        model = other_tools.load(setting.model, setting.dtype, setting.source.torch_device)
        ids = [torch.from_numpy(sample) for sample in samples.ids]
        strategy = other_tools.strategies(model, ids, layers, folder)[who]
        since = PeakSince(model)
        strategy()
        return since.above()


def _samples(setting: Setting) -> Samples:
    return near(QUICK_TOKENS if setting.quick else TOKENS, setting.vocabulary)


def _peak_of_run(setting: Setting, count: int) -> Peak:
    """`hiddentap capture` on `count` rows of token ids; what it loads is the model that memory is counted from."""
    load, since = hugging_face_backend.load_model, []

    def load_and_count(source: ModelSource, tp: int) -> LoadedModel:
        loaded = load(source, tp)
        since.append(PeakSince(loaded.model))
        return loaded

    with setting.scratch() as folder:
        rows = folder / "rows.jsonl"
        with rows.open("w") as file:
            for number, ids in enumerate(tiny(count, setting.vocabulary).ids):
                file.write(json.dumps({"id": str(number), "input_ids": ids.tolist()}) + "\n")
        size = setting.batch_tokens or GROWTH_BATCH_TOKENS
        asked = setting.asked(data=(str(rows),), out=folder / "out", batch_tokens=size, compile="off")
        hugging_face_backend.load_model = load_and_count
        summary = capture_dataset(asked)
        if summary.captured != count:
            raise RuntimeError(f"{summary.captured} samples were captured, {count} were given")
        return replace(since[0].above(), seconds=summary.seconds)
