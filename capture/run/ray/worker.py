"""The actor of Ray: a model that makes the plan, or fills and seals one shard after the other."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ....models.errors import RunError
from ...identity import identity_differences
from ...progress import Done
from ...store import OutputFolder, Plan
from ..assembly import opened, shard_run
from ..backend import kind_of
from ..distributed.ranks import Ranks
from ..distributed.tensor_group import TensorGroup
from ..engines.hugging_face.backend import HuggingFaceBackend, backend_of
from ..engines.hugging_face.streamed import StreamedBackend
from ..head import write_missing_head
from ..identity import forward_identity
from ..planned_images import require_images_taken
from ..preflight import preflight
from ..resuming import is_sealed, prepare_folder
from ..settings import CaptureSettings
from ..shard_run import ShardRun
from ..stopping import RunStopped
from .board import PREPARING, BoardStopping, WorkerProgress
from .cluster import require_ray


@dataclass(frozen=True)
class Prepared:
    """The summary's facts about the model that made the plan."""

    hidden_size: int
    notes: tuple[str, ...]


def worker_backend(settings: CaptureSettings, ranks: Ranks) -> HuggingFaceBackend | StreamedBackend:
    """Return the backend of one worker, which takes text alone: image files need not be where the worker is."""
    return replace(backend_of(settings, ranks), takes_images=False)


class ShardWorker:
    """One model in a process of its own. What is kept here is lost with the process, and made again in the next one."""

    def __init__(self, settings: CaptureSettings, working_directory: str, board_name: str) -> None:
        """`working_directory`: of the run, whose paths may be relative to it."""
        if Path(working_directory).is_dir():
            os.chdir(working_directory)
        # No work yet: what fails here is to Ray an actor that cannot be made, not an error to hand on.
        self._settings = settings
        self._board: Any = require_ray().get_actor(board_name)
        self._folder = OutputFolder(settings.out)
        self._progress, self._stopping = WorkerProgress(self._board), BoardStopping(self._board)
        self._until_the_end = ExitStack()
        self._run: ShardRun | None = None

    def prepare(self) -> Prepared | None:
        """Make the folder ready to be filled, as a run without Ray does; None where that was stopped.

        The run holds the folder's lock meanwhile. It is done here because it needs the model, and so what workers have.
        """
        self._board.start.remote(PREPARING)
        preflight(self._settings, kind_of(self._settings), self._progress, folder_is_held=True)
        loaded, attached = self._backend.loaded, self._backend.attached
        try:
            plan, _ = prepare_folder(self._backend, self._folder, self._progress, self._stopping)
        except RunStopped:
            return None
        require_images_taken(self._backend, plan.has_images)
        if self._settings.head:
            write_missing_head(self._folder.head, loaded, attached, TensorGroup(), self._progress)
        return Prepared(attached.hidden_size, loaded.notes)

    def fill(self, shards: tuple[int, ...], tokens: int, claim: str) -> bool:
        """Fill and seal these shards of the plan; False where that was stopped.

        tokens: what this worker is likely to capture in all. claim: that of the folder's lock, which this process then holds
        beside the run.
        """
        require_ray().get(self._board.start.remote(shards))
        self._progress.work = shards
        try:
            self._seal(shards, self._run or self._open(tokens, claim))
        except RunStopped:
            return False
        return True

    @cached_property
    def _backend(self) -> HuggingFaceBackend | StreamedBackend:
        return worker_backend(self._settings, Ranks())

    def _open(self, tokens: int, claim: str) -> ShardRun:
        self._until_the_end.enter_context(self._folder.join(claim))
        plan = Plan(self._folder.plan)
        self._require_model_of(plan)
        engine = self._until_the_end.enter_context(opened(self._backend, plan))
        self._run = shard_run(self._backend, plan, tokens, self._folder, engine, self._progress, self._stopping)
        return self._run

    def _require_model_of(self, plan: Plan) -> None:
        """Raise if the model is not the plan's: workers may be on other machines."""
        here = forward_identity(self._backend)
        changed = identity_differences({name: plan.identity[name] for name in here}, here)
        if changed:
            raise RunError("a Ray worker has another model than the plan (plan -> worker):\n  " + "\n  ".join(changed))

    def _seal(self, shards: tuple[int, ...], run: ShardRun) -> None:
        left = []
        for shard in shards:
            # A worker that was lost may have had this shard, and may have sealed it.
            self._folder.remove_unsealed(shard)
            planned = run.plan.shards[shard]
            if is_sealed(self._folder, run.plan, shard):
                self._progress.advanced(Done(planned.M, planned.R))
            else:
                left.append(planned)
        if left:
            run.capture(left)
            self._backend.loaded.require_unchanged()
            run.pacer.remember()
