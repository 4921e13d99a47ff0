"""The offline run: conversations in, sealed shards of hidden states out."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import nullcontext
from typing import TypeAlias

import torch

from ...models.loading import LoadedModel, load_model
from ..progress import Progress, Silent
from ..store import OutputFolder, Plan, PlannedShard, Shard
from .budget import TokenBudget
from .finishing import Effort, finish
from .head import write_head
from .hugging_face import AttachedModel, HuggingFaceBackend, HuggingFaceEngine, attach
from .identity import shard_metadata
from .pace import Pace
from .planned_images import image_metadata, planned_images, require_engine_for_images
from .ranks import Ranks
from .resuming import prepare_folder, sealed_shards, tokenise_options
from .settings import STORE_DTYPES, CaptureSettings
from .shard_run import ShardRun
from .speeds import Speeds, speed_key
from .steady_pace import SteadyPace
from .stopping import Stopping
from .summary import RunSummary
from .vllm import VllmBackend, VllmEngine, require_vllm_can

Backend: TypeAlias = HuggingFaceBackend | VllmBackend


def capture_dataset(
    settings: CaptureSettings, progress: Progress | None = None, stopping: Stopping | None = None
) -> RunSummary:
    """Fill `settings.out` with the hidden states of `settings.data`; go on where an earlier run on it stopped.

    Under torchrun every process calls this, and they share the work shard by shard. `stopping` lets somebody else end the run
    between two batches.

    Raises:
        UsageError: settings, ids, data or a folder that cannot be used; see the types that it has.
        RunError: the run failed; what was sealed stays, and the same call goes on from there. `RunStopped` is one.
    """
    ranks, stopping = Ranks.of_environment(), stopping or Stopping()
    with ranks.failing_together():
        return _captured(settings, ranks, progress or Silent(), stopping)


def backend_of(settings: CaptureSettings, ranks: Ranks) -> Backend:
    """The model of `settings`, opened for its engine; raises as `load_model` and `attach`, or `require_vllm_can`, do."""
    if settings.engine == "vllm":
        require_vllm_can(settings)
        return VllmBackend.of(settings)
    loaded = load_model(ranks.placed(settings.model))
    return HuggingFaceBackend(settings, loaded, *attach(loaded.model, settings))


def _captured(settings: CaptureSettings, ranks: Ranks, progress: Progress, stopping: Stopping) -> RunSummary:
    backend = backend_of(settings, ranks)
    loaded, attached = backend.loaded, backend.attached
    folder = OutputFolder(settings.out)
    with folder.lock() if ranks.is_first else nullcontext():
        if ranks.is_first:
            prepare_folder(settings, folder, loaded, attached, progress, stopping)
            if settings.head:
                write_head(folder.head, loaded, attached)
        ranks.meet("the folder is prepared", stopping.check)
        plan = Plan(folder.plan)
        done = sealed_shards(folder, plan)
        if ranks.is_first:
            _tell_plan(plan, done.values(), progress)
        progress = ranks.shared(progress)
        ranks.meet("all know what is done", stopping.check)
        left = [planned for planned in plan.shards if planned.index not in done]
        effort = _fill(settings, plan, left, folder, backend, ranks, progress, stopping)
        ranks.meet("all shards are sealed", stopping.check)
        loaded.require_unchanged()
        summary = finish(plan, folder, effort, attached, loaded, write=ranks.is_first)
    _remember(effort.pace, loaded, attached, ranks, progress)
    return summary


def _tell_plan(plan: Plan, done: Collection[Shard], progress: Progress) -> None:
    """What there is to do, and what an earlier run did of it."""
    samples = sum(shard.M + len(shard.rejects) for shard in done)
    progress.started("capturing", plan.M, tokens=plan.R, done=samples, done_tokens=sum(shard.R for shard in done))
    progress.note(
        f"plan: {plan.M:,} samples, {plan.R:,} tokens" + (f", {samples:,} samples done before" if samples else "")
    )
    progress.advanced(rejected=sum(1 for _ in plan.rejects()) + sum(len(shard.rejects) for shard in done))


def _fill(
    settings: CaptureSettings,
    plan: Plan,
    left: list[PlannedShard],
    folder: OutputFolder,
    backend: Backend,
    ranks: Ranks,
    progress: Progress,
    stopping: Stopping,
) -> Effort:
    """Capture the shards that are left, or this rank's part of them."""
    if not left:  # opening an engine can take minutes
        return Effort(0, 0.0, len(plan.shards), None)
    store_dtype = STORE_DTYPES[plan.identity["store_dtype"]]
    tokens = sum(planned.R for planned in left)
    require_engine_for_images(settings, plan.has_images)
    images = planned_images(plan, tokenise_options(settings, plan))
    with backend.engine(store_dtype, int(plan.lengths.max(initial=1))) as engine:
        pace = _pace(settings, backend, engine, tokens, progress)
        compiled = "off" if settings.exact else settings.compile
        run = ShardRun(
            plan,
            folder,
            engine,
            backend.attached.columns(store_dtype, is_text=plan.has_images),
            shard_metadata(plan.identity, plan.sources, plan.extra["mask_rules"], engine.made_with, compiled)
            | image_metadata(plan),
            pace,
            settings.on_bad_values,
            progress,
            stopping.check,
            images,
        )
        start = time.perf_counter()
        run.capture(ranks.take(left))
    return Effort(tokens, time.perf_counter() - start, len(plan.shards) - len(left), pace)


def _pace(
    settings: CaptureSettings,
    backend: Backend,
    engine: HuggingFaceEngine | VllmEngine,
    tokens: int,
    progress: Progress,
) -> Pace | SteadyPace | None:
    if isinstance(engine, VllmEngine):
        return SteadyPace(engine, settings.batch_tokens or VllmEngine.BATCH_TOKENS)
    if settings.exact:
        return None
    fixed = settings.batch_tokens
    budget = TokenBudget.probing(engine.device) if fixed is None else TokenBudget.fixed(fixed)
    known = Speeds.of_user().read(_speed_key(backend.loaded, backend.attached, engine.device))
    return Pace(engine, budget, settings.compile, tokens, progress.note, known)


def _remember(
    pace: Pace | SteadyPace | None, loaded: LoadedModel, attached: AttachedModel, ranks: Ranks, progress: Progress
) -> None:
    """Keep what was measured for the next run; a cache folder that cannot be written is worth a word and no more."""
    if pace is None or pace.measured is None or not ranks.is_first:
        return
    try:
        Speeds.of_user().write(_speed_key(loaded, attached, pace.device), pace.measured)
    except OSError as error:
        progress.note(f"measured speeds were not kept for the next run: {error}")


def _speed_key(loaded: LoadedModel, attached: AttachedModel, device: torch.device) -> str:
    return speed_key(loaded.config_hash, attached.taps.names, attached.dtype, device)
