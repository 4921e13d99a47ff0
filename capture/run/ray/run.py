"""The offline run on Ray: one plan, one folder, shards as tasks of an actor pool.

Ray's actors and not its data sets: what is passed on are numbers of shards, and a data set that is ended before its last block
leaves threads behind that start Ray anew.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ....models.errors import RunError, UsageError
from ...progress import Done, Progress
from ...store import FolderLock, OutputFolder, Plan, PlannedShard
from ..assembly import announce_plan
from ..backend import EngineKind
from ..distributed.ranks import wait_for_names
from ..engines.hugging_face.engine import identity_of_mode
from ..finishing import Effort, finish
from ..resuming import sealed_shards
from ..settings import CaptureSettings
from ..stopping import Stopping
from ..summary import RunSummary
from .board import Board, WorkerReport
from .cluster import Share, connected, on_this_machine, require_ray
from .worker import Prepared, ShardWorker, worker_backend

_LOOK_EVERY_S = 0.2
# A shard whose workers were lost so often more is taken to be the reason.
_MOST_RETRIES = 3


def require_ray_can(settings: CaptureSettings) -> None:
    """Raise UsageError where Ray is not installed, the run is one of torchrun's, or `settings` ask for tensor parallelism."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("engine ray starts its own workers; start it once, without torchrun.")
    require_ray()
    if settings.tp > 1:
        raise UsageError(
            "tp spreads a model over processes of torchrun; beside engine ray, take device_map=auto and GPUs a worker."
        )


def capture_on_ray(settings: CaptureSettings, progress: Progress, stopping: Stopping) -> RunSummary:
    """Fill `settings.out` as `capture_dataset` does, with the workers of `settings.ray`.

    This process holds the folder's lock and shows what all do; Ray starts a lost worker again and repeats its shard.

    Raises:
        UsageError: no Ray cluster is there; and what a worker raised.
        RunError: what a worker raised; a shard that no worker survives.
    """
    folder = OutputFolder(settings.out)
    with folder.lock() as lock:
        try:
            with connected(settings.ray) as share, _Pool(settings, share, progress, stopping) as pool:
                return _captured(folder, lock, pool, progress, stopping)
        finally:
            # Of workers that were lost, or ended with the run.
            folder.remove_stray_files()


def _captured(
    folder: OutputFolder,
    lock: FolderLock,
    pool: _Pool,
    progress: Progress,
    stopping: Stopping,
) -> RunSummary:
    prepared = pool.prepare()
    plan = Plan(folder.plan)
    done = sealed_shards(folder, plan)
    announce_plan(plan, done.values(), progress)
    left = [planned for planned in plan.shards if planned.index not in done]
    start = time.perf_counter()
    lock.share()
    pool.fill(left, lock.claim)
    wait_for_names(folder, len(plan.shards), stopping.check)
    effort = Effort(sum(planned.R for planned in left), time.perf_counter() - start, len(done), None)
    return finish(plan, folder, effort, prepared.hidden_size, prepared.notes)


class _Pool:
    """The workers, as long as the block: given work, and heard through the board."""

    def __init__(self, settings: CaptureSettings, share: Share, progress: Progress, stopping: Stopping) -> None:
        self._progress, self._stopping = progress, stopping
        self._streams_weights = settings.stream_weights
        self._ray: Any = require_ray()
        self._shown = Done()
        # Known by its name: an actor whose constructor was given a handle may not come back, Ray warns.
        name = f"hiddentap-{uuid.uuid4()}"
        board = self._ray.remote(num_cpus=0, scheduling_strategy=on_this_machine(), name=name)(Board)
        self._board = board.remote()
        actor = self._ray.remote(max_restarts=-1, max_task_retries=_MOST_RETRIES, **share.options)(ShardWorker)
        self._workers = [actor.remote(settings, str(Path.cwd()), name) for _ in range(settings.ray.count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in (*self._workers, self._board):
            self._ray.kill(actor)

    def prepare(self) -> Prepared:
        """Have the folder prepared by one of the workers; raises what it raises, and RunStopped."""
        task = self._workers[0].prepare.remote()
        while not self._ray.wait([task], timeout=_LOOK_EVERY_S)[0]:
            self._look()
        prepared: Prepared | None = self._result(task)
        self._look()
        if prepared is None:
            self._stopping.check()
            raise RunError("the folder was not prepared: the run was ended.")
        return prepared

    def fill(self, left: Sequence[PlannedShard], claim: str) -> None:
        """Have these shards filled, each by whichever worker is free; `claim`: that of the folder's lock, which all share.

        With streamed weights each worker takes its part of them at once, and makes blocks of them as large as it has memory.

        Raises the first error of a worker, and RunStopped: both after every worker came to the end of its shard or batch.
        """
        tokens = sum(planned.R for planned in left) // len(self._workers)
        parts = len(self._workers) if self._streams_weights else len(left)
        waiting, free = deque(divided([planned.index for planned in left], parts)), deque(self._workers)
        running: dict[Any, Any] = {}
        failure: Exception | None = None
        while waiting or running:
            while waiting and free:
                worker = free.popleft()
                running[worker.fill.remote(waiting.popleft(), tokens, claim)] = worker
            ready, _ = self._ray.wait(list(running), timeout=_LOOK_EVERY_S)
            for task in ready:
                free.append(running.pop(task))
                try:
                    self._result(task)
                except Exception as error:  # noqa: BLE001 - raised below, once the others have ended
                    failure = failure or error
                    self._board.stop.remote(signal.SIGTERM)
            if failure is not None or self._stopping.asked is not None:
                waiting.clear()
            self._look()
        if failure is not None:
            raise failure
        self._stopping.check()

    def _result(self, task: Any) -> Any:
        """Return the result of `task`, or raise its original error."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(task)
        except RayTaskError as error:
            error.cause.add_note(f"In a Ray worker:\n{error}")
            raise error.cause from None
        except RayError as error:
            raise RunError(
                f"Ray lost {_MOST_RETRIES + 1} workers over one shard, or a worker for good (memory, most often; see Ray's "
                f"logs); run the same command again. Ray says: {error}"
            ) from error

    def _look(self) -> None:
        """Show what the board says, and tell it where the run is to end."""
        if self._stopping.asked is not None:
            self._board.stop.remote(self._stopping.asked)
        report: WorkerReport = self._ray.get(self._board.report.remote())
        for work in report.started:
            self._progress.started(work)
        if report.done != self._shown:
            self._progress.advanced(report.done - self._shown)
            self._shown = report.done
        for note in report.notes:
            self._progress.note(note)


def divided(shards: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Return up to `parts` runs of neighbors in `shards`, whose lengths differ by one at most."""
    parts = min(parts, len(shards))
    edges = [len(shards) * part // parts for part in range(parts + 1)] if parts else [0]
    return [tuple(shards[begin:end]) for begin, end in pairwise(edges)]


KIND = EngineKind(require_ray_can, identity_of_mode, worker_backend, capture_on_ray)
