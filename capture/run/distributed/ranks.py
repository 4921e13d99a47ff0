"""Several processes on one run, as torchrun starts them: one plan, one folder, shards taken one at a time by whoever is free."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ....models.errors import RunError
from ....models.model_source import ModelSource
from ...progress import Done, Progress, Work
from ...store import OutputFolder

_CONNECTING = timedelta(minutes=10)
# While it waits for the others, which may tokenise for hours, a rank looks this often whether one of them failed.
_LOOK_EVERY_S = 0.2
_PARTING_S = 60.0
_FAILED, _PARTED = "failed", "parted"
# A network file system may show a name that another node made this much later (its folder caches live a minute by default).
_SHOWN_WITHIN_S = 90.0
_LOOK_FOR_NAMES_EVERY_S = 0.5
_runs = itertools.count()


class RankError(RunError):
    """Another process of the run failed."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run; alone by default.

    The ranks share nothing but a small key-value store (torchrun's) and the output folder.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: Store | None = None

    @classmethod
    def of_environment(cls) -> Ranks:
        """Read torchrun's RANK, WORLD_SIZE and the rest; a process alone without them.

        Each call begins a run of its own: ranks that call it as often as each other meet. So do those that torchrun started
        equally often (``--max-restarts``): what an earlier attempt left in the store is not theirs.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, size = next(iter(rendezvous("env://", timeout=_CONNECTING)))
        prefix = f"hiddentap/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_runs)}"
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), PrefixStore(prefix, store))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def placed(self, source: ModelSource) -> ModelSource:
        """Return `source` on this rank's own accelerator, unless a device was named."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if self.size == 1 or accelerator is None or source.device != "auto" or source.device_map is not None:
            return source
        # Kernels that launch on the current device must find the model there.
        torch.accelerator.set_device_index(self.local_rank)
        return replace(source, device=f"{accelerator.type}:{self.local_rank}")

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other ranks where the block fails, so that none waits for this one."""
        try:
            yield
        except BaseException as error:
            if self.store is not None:  # the first to fail tells why; what follows from it does not
                self.store.compare_set(_FAILED, "", f"rank {self.rank}: {error}")
            raise

    def meet(self, where: str, check_stop: Callable[[], None]) -> None:
        """Wait until every rank came to `where`.

        Raises:
            RankError: another rank failed. What `check_stop` raises, too.
        """
        if self.store is None:
            return
        store = self.store
        store.add(where, 1)
        self._wait(lambda: store.add(where, 0) >= self.size, check_stop)

    def agreed(self, what: str, make: Callable[[], dict[str, Any]], check_stop: Callable[[], None]) -> dict[str, Any]:
        """Broadcast what `make` returns on the first rank, JSON values, to every rank; raise as `meet` does."""
        if self.store is None:
            return make()
        store = self.store
        if self.is_first:
            store.set(what, json.dumps(make()))
        self._wait(lambda: store.check([what]), check_stop)
        value: dict[str, Any] = json.loads(store.get(what))
        return value

    def part(self) -> None:
        """End the run on this rank; the first one, whose process may hold the store, waits until the others have done so.

        It does not wait for ever: the run is complete, and a rank that was killed comes no more.
        """
        if self.store is None:
            return
        parted, end = self.store.add(_PARTED, 1), time.monotonic() + _PARTING_S
        while self.is_first and parted < self.size and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
            parted = self.store.add(_PARTED, 0)

    def require_no_failure(self) -> None:
        """Raise RankError where another rank failed."""
        if self.store is not None and self.store.check([_FAILED]):
            raise RankError(f"another process of this run failed: {self.store.get(_FAILED).decode()}")

    def _wait(self, ready: Callable[[], bool], check_stop: Callable[[], None]) -> None:
        try:
            while not ready():
                check_stop()
                self.require_no_failure()
                time.sleep(_LOOK_EVERY_S)
        except DistError as error:
            raise RankError(
                f"the process that holds the store of this run is gone ({str(error).splitlines()[0]}); run the same command again"
            ) from error

    def take(self, shards: Sequence[int]) -> Iterator[int]:
        """Yield those of `shards` (the same on every rank) that no other rank took, until none is left."""
        if self.store is None:
            yield from shards
            return
        while (place := self.store.add("shards/taken", 1) - 1) < len(shards):
            yield shards[place]

    def shared(self, progress: Progress) -> Progress:
        """Progress that the first rank shows for all."""
        return progress if self.store is None else _SharedProgress(self, self.store, progress)


class _SharedProgress:
    """Adds what every rank did; the first rank passes the sums on."""

    def __init__(self, ranks: Ranks, store: Store, progress: Progress) -> None:
        self._ranks, self._store, self._progress = ranks, store, progress
        self._shown = Done()

    def started(self, work: Work) -> None:
        if self._ranks.is_first:
            self._progress.started(work)

    def advanced(self, done: Done) -> None:
        totals = Done(**{name: self._store.add(f"captured/{name}", count) for name, count in asdict(done).items()})
        if self._ranks.is_first:
            self._progress.advanced(totals - self._shown)
            self._shown = totals

    def note(self, text: str) -> None:
        self._progress.note(f"rank {self._ranks.rank}: {text}")


@contextmanager
def shared_folder(
    folder: OutputFolder, ranks: Ranks, prepare: Callable[[], list[int]], check_stop: Callable[[], None]
) -> Iterator[list[int]]:
    """Run `prepare` on the first rank, which holds the folder alone until then; return its answer on every rank.

    While one rank lives, whichever, no other run gets into the folder: so no shard ever has two writers.

    Raises:
        FolderLockedError: another run holds the folder, or took it when the first rank died before this one came to it.
    """
    if not ranks.is_first:
        first = ranks.agreed("the folder", dict, check_stop)
        with folder.join(first["claim"]):
            yield first["left"]
        return
    with folder.lock() as lock:
        left = prepare()
        if ranks.size > 1:
            lock.share()
        yield ranks.agreed("the folder", lambda: {"claim": lock.claim, "left": left}, check_stop)["left"]


def wait_for_names(folder: OutputFolder, shards: int, check_stop: Callable[[], None]) -> None:
    """Until `shards` sealed shards are seen from this node, or long enough for the rest to be missed."""
    end = time.monotonic() + _SHOWN_WITHIN_S
    while folder.sealed_names() < shards and time.monotonic() < end:
        check_stop()
        time.sleep(_LOOK_FOR_NAMES_EVERY_S)
