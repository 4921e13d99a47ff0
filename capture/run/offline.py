"""The offline run: conversations in, sealed shards of hidden states out."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from ...models.loading import LoadedModel, load_model
from ..progress import Progress, Silent, Work
from ..store import OutputFolder, Plan, Shard
from .budget import TokenBudget
from .finishing import Effort, finish
from .head import write_head
from .hugging_face import AttachedModel, HuggingFaceBackend, HuggingFaceEngine, attach
from .identity import shard_metadata
from .lockstep import LeadingEngine, led
from .pace import Pace
from .planned_images import image_metadata, planned_images, require_engine_for_images
from .ranks import Ranks
from .resuming import prepare_folder, tokenise_options
from .settings import STORE_DTYPES, CaptureSettings
from .shard_run import ShardRun
from .shared_folder import shared_folder, wait_for_names
from .speeds import Speeds, speed_key
from .steady_pace import SteadyPace
from .stopping import Stopping
from .summary import RunSummary
from .tensor_group import TensorGroup, tensor_group
from .vllm import VllmBackend, VllmEngine, require_vllm_can

Backend: TypeAlias = HuggingFaceBackend | VllmBackend


def capture_dataset(
    settings: CaptureSettings, progress: Progress | None = None, stopping: Stopping | None = None
) -> RunSummary:
    """Fill `settings.out` with the hidden states of `settings.data`; go on where an earlier run on it stopped.

    Under torchrun every process calls this, and they share the work shard by shard; with `settings.tp` above 1 that many of
    them hold one copy of the model together, and the first of them writes. With engine ``ray`` one process calls it, and the
    work is done by workers that Ray runs. `stopping` lets somebody else end the run between two batches.

    Raises:
        UsageError: settings, ids, data or a folder that cannot be used; see the types that it has.
        RunError: the run failed; what was sealed stays, and the same call goes on from there. `RunStopped` is one.
    """
    if settings.engine == "ray":
        from .ray_run import capture_on_ray

        return capture_on_ray(settings, progress or Silent(), stopping or Stopping())
    ranks, stopping = Ranks.of_environment(), stopping or Stopping()
    with ranks.failing_together(), tensor_group(ranks, settings.tp) as group:
        return _captured(settings, ranks, group, progress or Silent(), stopping)


def backend_of(settings: CaptureSettings, ranks: Ranks) -> Backend:
    """The model of `settings`, opened for its engine; raises as `load_model` and `attach`, or `require_vllm_can`, do."""
    if settings.engine == "vllm":
        require_vllm_can(settings)
        return VllmBackend.of(settings)
    loaded = load_model(ranks.placed(settings.model) if settings.tp == 1 else settings.model, settings.tp)
    return HuggingFaceBackend(settings, loaded, *attach(loaded.model, settings))


def _captured(
    settings: CaptureSettings, ranks: Ranks, group: TensorGroup, progress: Progress, stopping: Stopping
) -> RunSummary:
    backend = backend_of(settings, ranks)
    loaded, attached = backend.loaded, backend.attached
    folder = OutputFolder(settings.out)

    def prepare() -> list[int]:
        plan, done = prepare_folder(settings, folder, loaded, attached, progress, stopping)
        tell_plan(plan, done.values(), progress)
        return [index for index in range(len(plan.shards)) if index not in done]

    with shared_folder(folder, ranks, prepare, stopping.check) as left:
        plan = Plan(folder.plan)
        if settings.head and ranks.rank < group.size:
            write_head(folder.head, loaded, attached, group)
        shared = ranks.shared(progress)
        effort = _fill(backend, plan, left, folder, ranks, group, shared, stopping)
        loaded.require_unchanged()

        def finished() -> dict[str, Any]:
            if ranks.size > 1:
                wait_for_names(folder, len(plan.shards), stopping.check)
            return finish(plan, folder, effort, attached.hidden_size, loaded.notes).as_json()

        summary = RunSummary.from_json(ranks.agreed("the summary", finished, stopping.check))
    if ranks.is_first:
        remember(effort.pace, settings, loaded, attached, progress)
    return summary


def tell_plan(plan: Plan, done: Collection[Shard], progress: Progress) -> None:
    """What there is to do, and what an earlier run did of it."""
    samples = sum(shard.M + len(shard.rejects) for shard in done)
    progress.started(Work("capturing", plan.M, tokens=plan.R, done=samples, done_tokens=sum(shard.R for shard in done)))
    progress.note(
        f"plan: {plan.M:,} samples, {plan.R:,} tokens" + (f", {samples:,} samples done before" if samples else "")
    )
    progress.advanced(rejected=sum(1 for _ in plan.rejects()) + sum(len(shard.rejects) for shard in done))


def _fill(
    backend: Backend,
    plan: Plan,
    left: list[int],
    folder: OutputFolder,
    ranks: Ranks,
    group: TensorGroup,
    progress: Progress,
    stopping: Stopping,
) -> Effort:
    """Capture the shards that are left, the part of them that falls to this rank or to its group, and wait for the others'."""
    if not left:  # opening an engine can take minutes
        return Effort(0, 0.0, len(plan.shards), None)
    require_engine_for_images(backend.settings, plan.has_images)
    tokens = sum(plan.shards[index].R for index in left)
    pace, start = None, time.perf_counter()
    with opened(backend, plan) as own, led(own, group, stopping) as engine:
        if engine is not None:
            run = shard_run(backend, plan, tokens, folder, engine, progress, stopping)
            pace, start = run.pace, time.perf_counter()
            run.capture(plan.shards[index] for index in ranks.take(left))
    ranks.meet("all shards are sealed", stopping.check)
    return Effort(tokens, time.perf_counter() - start, len(plan.shards) - len(left), pace)


def opened(backend: Backend, plan: Plan) -> AbstractContextManager[HuggingFaceEngine | VllmEngine]:
    """The engine of `backend`, open inside the block, for the samples of `plan`."""
    return backend.engine(STORE_DTYPES[plan.identity["store_dtype"]], int(plan.lengths.max(initial=1)))


def shard_run(
    backend: Backend,
    plan: Plan,
    tokens: int,
    folder: OutputFolder,
    engine: HuggingFaceEngine | VllmEngine | LeadingEngine,
    progress: Progress,
    stopping: Stopping,
) -> ShardRun:
    """What captures shards of `plan`, `tokens` rows of them, with `engine`."""
    settings = backend.settings
    compiled = "off" if settings.exact else settings.compile
    return ShardRun(
        plan,
        folder,
        engine,
        backend.attached.columns(STORE_DTYPES[plan.identity["store_dtype"]], is_text=plan.has_images),
        shard_metadata(plan.identity, plan.sources, plan.extra["mask_rules"], engine.made_with, compiled)
        | image_metadata(plan),
        _pace(backend, engine, tokens, progress),
        settings.on_bad_values,
        progress,
        stopping.check,
        planned_images(plan, tokenise_options(settings, plan)),
    )


def _pace(
    backend: Backend,
    engine: HuggingFaceEngine | LeadingEngine | VllmEngine,
    tokens: int,
    progress: Progress,
) -> Pace | SteadyPace | None:
    settings = backend.settings
    if isinstance(engine, VllmEngine):
        return SteadyPace(engine, settings.batch_tokens or VllmEngine.BATCH_TOKENS)
    if settings.exact:
        return None
    fixed = settings.batch_tokens
    budget = TokenBudget.probing(engine.device) if fixed is None else TokenBudget.fixed(fixed)
    known = Speeds.of_user().read(_speed_key(settings, backend.loaded, backend.attached, engine.made_with))
    # One process alone would find that compiling fails, and go on without; so it is not tried in a group unasked.
    mode = "off" if settings.tp > 1 and settings.compile == "auto" else settings.compile
    return Pace(engine, budget, mode, tokens, progress.note, known)


def remember(
    pace: Pace | SteadyPace | None,
    settings: CaptureSettings,
    loaded: LoadedModel,
    attached: AttachedModel,
    progress: Progress,
) -> None:
    """Keep what was measured for the next run; a cache folder that cannot be written is worth a word and no more."""
    if pace is None or pace.measured is None:
        return
    try:
        Speeds.of_user().write(_speed_key(settings, loaded, attached, pace.made_with), pace.measured)
    except OSError as error:
        progress.note(f"measured speeds were not kept for the next run: {error}")


def _speed_key(
    settings: CaptureSettings, loaded: LoadedModel, attached: AttachedModel, made_with: Mapping[str, Any]
) -> str:
    return speed_key(
        loaded.config_hash,
        attached.taps.names,
        attached.dtype,
        made_with,
        attention=settings.model.attn_implementation,
        top_logits=settings.top_logits,
    )
