"""The parts of a run put together: an open engine, and what captures shards with it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from ..progress import Done, Progress, Work
from ..store import OutputFolder, Plan, Shard
from .backend import Backend
from .engine import Engine
from .identity import shard_metadata
from .planned_images import image_metadata, planned_images
from .resuming import tokenise_options
from .settings import STORE_DTYPES
from .shard_run import ShardRun
from .stopping import Stopping


def opened(backend: Backend[Any], plan: Plan) -> AbstractContextManager[Any]:
    """Return the engine of `backend`, open inside the block, for the samples of `plan`."""
    return backend.engine(STORE_DTYPES[plan.identity["store_dtype"]], int(plan.lengths.max(initial=1)))


def shard_run(
    backend: Backend[Any],
    plan: Plan,
    tokens: int,
    folder: OutputFolder,
    engine: Engine,
    progress: Progress,
    stopping: Stopping,
) -> ShardRun:
    """Return what captures shards of `plan`, `tokens` rows of them, with `engine`."""
    settings = backend.settings
    compiled = "off" if settings.exact else settings.compile
    return ShardRun(
        plan,
        folder,
        engine,
        backend.attached.columns(STORE_DTYPES[plan.identity["store_dtype"]], is_text=plan.has_images),
        shard_metadata(plan.identity, plan.sources, plan.extra.mask_rules, engine.made_with, compiled)
        | image_metadata(plan),
        backend.pacer(engine, tokens, progress.note),
        settings.on_bad_values,
        progress,
        stopping.check,
        planned_images(plan, tokenise_options(settings, plan)),
        backend.attached.limits,
        settings.prefill_chunk,
    )


def announce_plan(plan: Plan, done: Collection[Shard], progress: Progress) -> None:
    """Report what there is to do, and what an earlier run did of it."""
    samples = sum(shard.M + len(shard.rejects) for shard in done)
    progress.started(Work("capturing", plan.M, tokens=plan.R, done=samples, done_tokens=sum(shard.R for shard in done)))
    progress.note(
        f"plan: {plan.M:,} samples, {plan.R:,} tokens" + (f", {samples:,} samples done before" if samples else "")
    )
    progress.advanced(Done(rejected=sum(1 for _ in plan.rejects()) + sum(len(shard.rejects) for shard in done)))
