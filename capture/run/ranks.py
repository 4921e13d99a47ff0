"""Several processes on one run, as torchrun starts them: one plan, one folder, shards taken one at a time by whoever is free."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ...models.errors import RunError
from ...models.loading import ModelSource
from ..progress import Progress, Work

_CONNECTING = timedelta(minutes=10)
# While it waits for the others, which may tokenise for hours, a rank looks this often whether one of them failed.
_LOOK_EVERY_S = 0.2
_FAILED = "failed"
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
        """As torchrun says in RANK, WORLD_SIZE and the rest; alone where it says nothing.

        Each call begins a run of its own: ranks that call it as often as each other meet.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, size = next(iter(rendezvous("env://", timeout=_CONNECTING)))
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), PrefixStore(f"hiddentap/{next(_runs)}", store))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def placed(self, source: ModelSource) -> ModelSource:
        """`source` on this rank's own accelerator, unless a device was named."""
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
        """What `make` gives on the first rank, JSON values, on every rank; raises as `meet` does."""
        if self.store is None:
            return make()
        store = self.store
        if self.is_first:
            store.set(what, json.dumps(make()))
        self._wait(lambda: store.check([what]), check_stop)
        value: dict[str, Any] = json.loads(store.get(what))
        return value

    def require_no_failure(self) -> None:
        """Raise RankError where another rank failed."""
        if self.store is not None and self.store.check([_FAILED]):
            raise RankError(f"another process of this run failed: {self.store.get(_FAILED).decode()}")

    def _wait(self, ready: Callable[[], bool], check_stop: Callable[[], None]) -> None:
        while not ready():
            check_stop()
            self.require_no_failure()
            time.sleep(_LOOK_EVERY_S)

    def take(self, shards: Sequence[int]) -> Iterator[int]:
        """Those of `shards` (the same on every rank) that no other rank took; a rank is idle only when none is left."""
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
        self._shown: tuple[int, ...] = (0, 0, 0, 0)

    def started(self, work: Work) -> None:
        if self._ranks.is_first:
            self._progress.started(work)

    def advanced(self, count: int = 0, tokens: int = 0, *, written: int = 0, rejected: int = 0) -> None:
        more = {"count": count, "tokens": tokens, "written": written, "rejected": rejected}
        totals = tuple(self._store.add(f"captured/{name}", n) for name, n in more.items())
        if self._ranks.is_first:
            count, tokens, written, rejected = (now - before for now, before in zip(totals, self._shown, strict=True))
            self._progress.advanced(count, tokens, written=written, rejected=rejected)
            self._shown = totals

    def note(self, text: str) -> None:
        self._progress.note(f"rank {self._ranks.rank}: {text}")
