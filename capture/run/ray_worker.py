"""What runs in an actor of Ray: a model, which makes the plan or fills shards, one after the other, and seals them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...models.errors import RunError
from ...models.loading import load_model
from ..store import OutputFolder, Plan
from .head import write_head
from .hugging_face import HuggingFaceBackend, attach
from .identity import forward_identity
from .offline import opened, remember, shard_run
from .planning import identity_differences
from .ray_board import PREPARING, BoardStopping, WorkerProgress
from .ray_cluster import require_ray
from .resuming import is_sealed, prepare_folder
from .settings import CaptureSettings
from .shard_run import ShardRun
from .stopping import RunStopped
from .tensor_group import TensorGroup


@dataclass(frozen=True)
class Prepared:
    """What the summary says of the model that made the plan."""

    hidden_size: int
    notes: tuple[str, ...]


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
        loaded, attached = self._backend.loaded, self._backend.attached
        self._board.start.remote(PREPARING)
        try:
            prepare_folder(self._settings, self._folder, loaded, attached, self._progress, self._stopping)
        except RunStopped:
            return None
        if self._settings.head:
            write_head(self._folder.head, loaded, attached, TensorGroup())
        return Prepared(attached.hidden_size, loaded.notes)

    def fill(self, shard: int, tokens: int, claim: str) -> bool:
        """Fill and seal that shard of the plan; False where that was stopped.

        tokens: what this worker is likely to capture in all. claim: that of the folder's lock, which this process then holds
        beside the run.
        """
        require_ray().get(self._board.start.remote(shard))
        self._progress.shard = shard
        try:
            self._seal(shard, self._run or self._open(tokens, claim))
        except RunStopped:
            return False
        return True

    @cached_property
    def _backend(self) -> HuggingFaceBackend:
        loaded = load_model(self._settings.model)
        return HuggingFaceBackend(self._settings, loaded, *attach(loaded.model, self._settings))

    def _open(self, tokens: int, claim: str) -> ShardRun:
        self._until_the_end.enter_context(self._folder.join(claim))
        plan = Plan(self._folder.plan)
        self._require_model_of(plan)
        engine = self._until_the_end.enter_context(opened(self._backend, plan))
        self._run = shard_run(self._backend, plan, tokens, self._folder, engine, self._progress, self._stopping)
        return self._run

    def _require_model_of(self, plan: Plan) -> None:
        """The model must be the one that the plan was made with: workers may be on other machines."""
        here = forward_identity(self._settings, self._backend.loaded, self._backend.attached)
        changed = identity_differences({name: plan.identity[name] for name in here}, here)
        if changed:
            raise RunError("a Ray worker has another model than the plan (plan -> worker):\n  " + "\n  ".join(changed))

    def _seal(self, shard: int, run: ShardRun) -> None:
        # A worker that was lost may have had this shard, and may have sealed it.
        self._folder.remove_unsealed(shard)
        planned = run.plan.shards[shard]
        if is_sealed(self._folder, run.plan, shard):
            self._progress.advanced(planned.M, planned.R)
            return
        run.capture([planned])
        self._backend.loaded.require_unchanged()
        remember(run.pace, self._settings, self._backend.loaded, self._backend.attached, self._progress)
