"""The offline run: conversations in, sealed shards of hidden states out."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

from ...models.loading import LoadedModel, load_model
from ..data import Tokeniser, identity_of
from ..store import Manifest, OutputFolder, Plan, Shard
from .budget import TokenBudget
from .engine import AttachedModel, HuggingFaceEngine, attach, attached_engine
from .head import write_head
from .identity import run_identity, shard_metadata
from .pace import Pace
from .planning import existing_plan, make_plan, require_same_identity
from .progress import Progress, Silent
from .settings import STORE_DTYPES, CaptureSettings
from .shard_run import ShardRun
from .space import bytes_of_rows, require_space
from .speeds import Speeds, speed_key
from .stopping import Stopping
from .summary import RunSummary


def capture_dataset(
    settings: CaptureSettings, progress: Progress | None = None, stopping: Stopping | None = None
) -> RunSummary:
    """Fill `settings.out` with the hidden states of `settings.data`; go on where an earlier run on it stopped.

    `stopping` lets somebody else end the run between two batches.

    Raises:
        UsageError: settings, ids, data or a folder that cannot be used; see the types that it has.
        RunError: the run failed; what was sealed stays, and the same call goes on from there. `RunStopped` is one.
    """
    progress, stopping = progress or Silent(), stopping or Stopping()
    loaded = load_model(settings.model)
    attached, collector = attach(loaded.model, settings.taps, top_logits=settings.top_logits)
    folder = OutputFolder(settings.out)
    with folder.lock():
        folder.remove_stray_files()
        plan = _plan(settings, folder, loaded, attached, progress, stopping)
        if settings.head:
            write_head(folder.head, loaded, attached)
        done = _sealed(folder, plan, progress)
        before = len(done)
        dtype = STORE_DTYPES[plan.identity["store_dtype"]]
        with attached_engine(attached, collector, dtype, settings.tap_names(attached.taps)) as engine:
            columns = attached.columns(dtype)
            left = [planned for planned in plan.shards if planned.index not in done]
            require_space(folder.path, bytes_of_rows(columns, sum(p.R for p in left)), force=settings.force)
            key = speed_key(loaded.config_hash, attached.taps.names, attached.dtype, engine.device)
            pace = _pace(settings, engine, sum(planned.R for planned in left), key, progress)
            run = ShardRun(
                plan,
                folder,
                engine,
                columns,
                partial(shard_metadata, plan.identity, plan.extra["mask_rules"]),
                pace,
                settings.on_bad_values,
                progress,
                stopping.check,
            )
            start = time.perf_counter()
            new = run.capture(left)
            if pace is not None and pace.measured is not None:
                Speeds.of_user().write(key, pace.measured)
            timing = _Timing(sum(shard.R for shard in new.values()), time.perf_counter() - start, before)
        return _finish(settings, plan, folder, done | new, timing, _Facts(attached, loaded, pace))


@dataclass(frozen=True)
class _Facts:
    """What the summary tells of the run beside its counts."""

    attached: AttachedModel
    loaded: LoadedModel
    pace: Pace | None


@dataclass(frozen=True)
class _Timing:
    tokens: int
    seconds: float
    shards_before: int


def _plan(
    settings: CaptureSettings,
    folder: OutputFolder,
    loaded: LoadedModel,
    attached: AttachedModel,
    progress: Progress,
    stopping: Stopping,
) -> Plan:
    plan = existing_plan(folder)
    # A template that asks for today's date gets that of the first run on this folder.
    date = plan.extra["template_date"] if plan else datetime.date.today().isoformat()
    options = settings.text.tokenise_options(settings.model, date=date, vocab_rows=attached.decoder.vocab_rows)
    identity = run_identity(settings, loaded, attached, identity_of(Tokeniser(options)))
    if plan is None:
        plan = make_plan(settings, folder, options, identity, progress, stopping.check)
        Manifest.from_shards(identity, plan.summary(), [], complete=False).write(folder.manifest_path)
        return plan
    require_same_identity(plan, identity, folder)
    return plan


def _sealed(folder: OutputFolder, plan: Plan, progress: Progress) -> dict[int, Shard]:
    """The shards that are done; what lies under a shard's name and is not it goes."""
    found = folder.sealed_shards()
    done = {}
    for index, shard in found.shards.items():
        if index < len(plan.shards) and plan.shards[index].is_held_by(shard):
            done[index] = shard
    for index in (found.shards.keys() | found.broken.keys()) - done.keys():
        progress.note(f"{folder.shard_path(index).name} is not whole or not of this plan; it is made again")
        folder.shard_path(index).unlink()
    progress.planned(plan.M, plan.R, sum(s.M for s in done.values()), sum(s.R for s in done.values()))
    return done


def _finish(
    settings: CaptureSettings,
    plan: Plan,
    folder: OutputFolder,
    done: dict[int, Shard],
    timing: _Timing,
    facts: _Facts,
) -> RunSummary:
    shards = [done[index] for index in sorted(done)]
    rejects = [*plan.rejects(), *(reject for shard in shards for reject in shard.rejects)]
    codes = Counter(reject.detail.get("code", "other") for reject in rejects)
    folder.write_rejects(rejects)
    summary = RunSummary(
        out=folder.path,
        captured=sum(shard.M for shard in shards),
        rejected=len(rejects),
        rejected_by_code=dict(codes.most_common()),
        tokens=sum(shard.R for shard in shards),
        supervised_tokens=plan.extra["supervised_tokens"],
        truncated=plan.extra["truncated"],
        warnings=plan.extra["warnings"],
        shards=len(shards),
        shards_done_before=timing.shards_before,
        bytes=sum(shard.nbytes for shard in shards),
        tokens_now=timing.tokens,
        seconds=timing.seconds,
        batch_tokens=facts.pace.batch_tokens if facts.pace else None,
        layer_ids=tuple(plan.identity["taps"]["layer_ids"]),
        convention=settings.convention,
        hidden_size=facts.attached.hidden_size,
        notes=facts.loaded.notes,
    )
    manifest = Manifest.from_shards(plan.identity, plan.summary(), shards, complete=True, counts=summary.counts())
    manifest.write(folder.manifest_path)
    return summary


def _pace(
    settings: CaptureSettings, engine: HuggingFaceEngine, tokens: int, key: str, progress: Progress
) -> Pace | None:
    if settings.exact:
        return None
    fixed = settings.batch_tokens
    budget = TokenBudget.probing(engine.device) if fixed is None else TokenBudget.fixed(fixed)
    return Pace(engine, budget, settings.compile, tokens, progress.note, Speeds.of_user().read(key))
