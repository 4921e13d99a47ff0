"""The offline run: conversations in, sealed shards of hidden states out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..progress import Progress, Silent
from ..store import OutputFolder, Plan
from .assembly import announce_plan, opened, shard_run
from .backend import Backend, kind_of, opened_backend
from .distributed.lockstep import led
from .distributed.ranks import Ranks, shared_folder, wait_for_names
from .distributed.tensor_group import TensorGroup, tensor_group
from .engine import Engine
from .finishing import Effort, finish
from .head import write_missing_head
from .planned_images import require_images_taken
from .preflight import preflight
from .resuming import prepare_folder
from .settings import CaptureSettings
from .stopping import Stopping
from .summary import RunSummary


def capture_dataset(
    settings: CaptureSettings, progress: Progress | None = None, stopping: Stopping | None = None
) -> RunSummary:
    """Fill `settings.out` with the hidden states of `settings.data`; resume where an earlier run on it stopped.

    Under torchrun every process calls this, and they share the work shard by shard; with `settings.tp` above 1 that many of
    them hold one copy of the model together, and the first of them writes. With engine ``ray`` one process calls it, and Ray's
    workers do the work.

    Args:
        progress: receives reports; None logs notes to ``hiddentap`` at level INFO.
        stopping: ends the run between two batches when it is asked to.

    Raises:
        UsageError: settings, ids, data or a folder that cannot be used; see its subclasses.
        RunError: the run failed; sealed shards stay, and the same call resumes from them. `RunStopped` is one.

    Example:
        >>> capture_dataset(CaptureSettings("MODEL", "chats.jsonl", "OUT2", layer_ids=[0, 1, 2])).captured
        5
        >>> CapturedDataset("OUT2")[0]["aux_hidden_states"].shape
        torch.Size([53, 3, 32])
    """
    kind = kind_of(settings)
    progress, stopping = progress or Silent(), stopping or Stopping()
    if kind.elsewhere is not None:
        return kind.elsewhere(settings, progress, stopping)
    ranks = Ranks.of_environment()
    with ranks.failing_together(), tensor_group(ranks, settings.tp) as group:
        if ranks.is_first:
            preflight(settings, kind, progress)
        backend = opened_backend(kind, settings, ranks)
        return _DatasetRun(backend, OutputFolder(settings.out), ranks, group, progress, stopping).capture()


@dataclass(frozen=True)
class _DatasetRun:
    """The part of a run in this process: its model, its folder, and the processes that share the work."""

    backend: Backend[Any]
    folder: OutputFolder
    ranks: Ranks
    group: TensorGroup
    progress: Progress
    stopping: Stopping

    def capture(self) -> RunSummary:
        """Plan, fill the shards that are left, and sum the run up; the summary is the same on every rank."""
        backend, ranks, check_stop = self.backend, self.ranks, self.stopping.check
        with shared_folder(self.folder, ranks, self._prepare, check_stop) as left:
            plan = Plan(self.folder.plan)
            if backend.settings.head and ranks.rank < self.group.size:
                write_missing_head(self.folder.head, backend.loaded, backend.attached, self.group, self.progress)
            effort = self._fill(plan, left)
            backend.loaded.require_unchanged()
            summary = RunSummary.from_json(ranks.agreed("the summary", partial(self._finish, plan, effort), check_stop))
        ranks.part()
        return summary

    def _prepare(self) -> list[int]:
        """Make the folder ready and return the shards that are left."""
        plan, done = prepare_folder(self.backend, self.folder, self.progress, self.stopping)
        announce_plan(plan, done.values(), self.progress)
        return [index for index in range(len(plan.shards)) if index not in done]

    def _fill(self, plan: Plan, left: list[int]) -> Effort:
        """Capture this rank's share of the shards that are left, and wait for the others."""
        done = len(plan.shards) - len(left)
        if not left:  # opening an engine can take minutes
            return Effort(0, 0.0, done, None)
        require_images_taken(self.backend, plan.has_images)
        tokens = sum(plan.shards[index].R for index in left)
        with opened(self.backend, plan) as own, led(own, self.group, self.stopping) as engine:
            start = time.perf_counter()
            batch_tokens = None if engine is None else self._capture_shards(engine, plan, left, tokens)
        self.ranks.meet("all shards are sealed", self.stopping.check)
        return Effort(tokens, time.perf_counter() - start, done, batch_tokens)

    def _capture_shards(self, engine: Engine, plan: Plan, left: list[int], tokens: int) -> int | None:
        """Capture one shard after the other until none is left; return the last budget of positions."""
        progress = self.ranks.shared(self.progress)
        run = shard_run(self.backend, plan, tokens, self.folder, engine, progress, self.stopping)
        run.capture(plan.shards[index] for index in self.ranks.take(left))
        if self.ranks.is_first:
            run.pacer.remember()
        return run.pacer.batch_tokens

    def _finish(self, plan: Plan, effort: Effort) -> dict[str, Any]:
        if self.ranks.size > 1:
            wait_for_names(self.folder, len(plan.shards), self.stopping.check)
        return finish(plan, self.folder, effort, self.backend.attached.hidden_size, self.backend.loaded.notes).as_json()
