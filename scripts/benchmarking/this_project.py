"""hiddentap's own run from a made plan to sealed shards, and the floor below it: bare forwards of the same batches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hiddentap.capture.progress import Silent
from hiddentap.capture.run import CaptureSettings
from hiddentap.capture.run.batches import BatchRule, Place, SampleRows, TokenBatch
from hiddentap.capture.run.engines.hugging_face.engine import attach, attached_engine, fast_forwards
from hiddentap.capture.run.pacing.budget import TokenBudget
from hiddentap.capture.run.pacing.pace import Pace
from hiddentap.capture.run.shard_run import ShardRun
from hiddentap.capture.store import Manifest, OutputFolder, Plan, PlanWriter
from hiddentap.hooks import compiled_layers
from hiddentap.models.call import input_device
from hiddentap.models.loaded_model import LoadedModel

from .rounds import Stopwatch, tell
from .samples import Samples


@dataclass(frozen=True)
class Run:
    """What one run took, and the budget of positions that it settled on (None: it never did)."""

    seconds: float
    batch_tokens: int | None


class Hiddentap:
    """The engine that `hiddentap capture` runs, on a model that is loaded already."""

    def __init__(self, loaded: LoadedModel, asked: CaptureSettings) -> None:
        self.attached, self._collector = attach(loaded.model, asked)
        self.device = input_device(loaded.model)
        self.columns = self.attached.columns(self.attached.dtype)
        self._asked = asked

    def run(self, plan: Plan, out: Path, budget: TokenBudget, *, compiled: bool) -> Run:
        """Token ids on disk -> sealed shards on disk and a manifest; `out` is empty or new, and gone afterwards."""
        attached, watch = self.attached, Stopwatch(self.device)
        folder = OutputFolder(out)
        with (
            folder.lock(),
            attached_engine(attached, self._collector, attached.dtype, self._asked) as engine,
        ):
            pace = Pace(engine, budget, "on" if compiled else "off", plan.R, tell)
            with watch.running():
                work = ShardRun(plan, folder, engine, self.columns, {}, pace, "raise", Silent(), _never)
                work.capture(plan.shards)
                sealed = folder.sealed_shards().shards.values()
                Manifest.from_shards({}, plan.summary(), sealed, complete=True).write(folder.manifest_path)
        rows = sum(shard.R for shard in sealed)
        if rows != plan.R:
            raise RuntimeError(f"{rows} rows were sealed, {plan.R} were planned")
        shutil.rmtree(out)
        return Run(watch.seconds, pace.batch_tokens)

    @torch.inference_mode()
    def bare_forwards(self, plan: Plan, batch_tokens: int, *, compiled: bool) -> float:
        """Seconds of the same batches through the model without its lm_head: no taps, no copies, no disk."""
        model: Any = self.attached.decoder.model
        decoder, watch = model.get_decoder(), Stopwatch(self.device)
        layers = compiled_layers(self.attached.decoder) if compiled else nullcontext()
        with fast_forwards(self.attached, self._asked), layers, watch.running():
            for batch in batches(plan, batch_tokens):
                decoder(input_ids=batch.input_ids.to(self.device, non_blocking=True), use_cache=False)
        return watch.seconds


def batches(plan: Plan, batch_tokens: int) -> Iterator[TokenBatch]:
    """The batches that a run over `plan` makes under this budget, built as it builds them."""
    for planned in plan.shards:
        input_ids, _ = plan.tokens_of(planned)
        samples = SampleRows((), planned.row_offsets, input_ids)
        place = Place(0)
        while place.sample < samples.M:
            batch = samples.batch(place, batch_tokens, BatchRule())
            yield batch
            place = batch.next


def write_plan(folder: Path, samples: Samples, shards: int) -> Plan:
    """The plan of `samples`, cut into about so many shards."""
    with PlanWriter(folder) as writer:
        for number, ids in enumerate(samples.ids):
            mask = np.ones(len(ids), np.uint8)
            writer.add(ids, mask, sample_id=str(number), source=0, line=number + 1)
        return writer.seal({}, [samples.name], shard_rows=max(1, -(-samples.tokens // shards)))


def _never() -> None:
    """Nobody asks for the end of the run."""
