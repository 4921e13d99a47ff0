"""Several processes on one run, as torchrun starts them: one plan, one folder, shards taken one at a time by whoever is free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ...models.loading import ModelSource
from ..store import PlannedShard
from .progress import Progress

# The first rank may tokenise for days before the others have anything to do.
_PATIENCE = timedelta(days=30)


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
        """As torchrun says in RANK, WORLD_SIZE and the rest; alone where it says nothing."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, size = next(iter(rendezvous("env://", timeout=_PATIENCE)))
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), store)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def placed(self, source: ModelSource) -> ModelSource:
        """`source` on this rank's own accelerator, unless a device was named."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if self.size == 1 or accelerator is None or source.device != "auto" or source.device_map is not None:
            return source
        return replace(source, device=f"{accelerator.type}:{self.local_rank}")

    def meet(self, where: str) -> None:
        """Wait until every rank came to `where`."""
        if self.store is None:
            return
        if self.store.add(f"{where}/came", 1) == self.size:
            self.store.set(f"{where}/all", "1")
        self.store.wait([f"{where}/all"], _PATIENCE)

    def take(self, shards: Sequence[PlannedShard]) -> Iterator[PlannedShard]:
        """Shards of `shards` (the same on every rank) that no other rank took; a rank is idle only when none is left."""
        if self.store is None:
            yield from shards
            return
        while (index := self.store.add("shards/taken", 1) - 1) < len(shards):
            yield shards[index]

    def shared(self, progress: Progress) -> Progress:
        """Progress that the first rank shows for all."""
        return progress if self.store is None else _SharedProgress(self, self.store, progress)


class _SharedProgress:
    """Adds what every rank did; the first rank passes the sums on."""

    def __init__(self, ranks: Ranks, store: Store, progress: Progress) -> None:
        self._ranks, self._store, self._progress = ranks, store, progress
        self._shown = {"samples": 0, "tokens": 0}

    def tokenised(self, rows: int, rejected: int) -> None:
        self._progress.tokenised(rows, rejected)

    def planned(self, samples: int, tokens: int, done_samples: int, done_tokens: int) -> None:
        if self._ranks.is_first:
            self._progress.planned(samples, tokens, done_samples, done_tokens)

    def captured(self, samples: int, tokens: int) -> None:
        totals = {
            name: self._store.add(f"captured/{name}", n) for name, n in (("samples", samples), ("tokens", tokens))
        }
        if self._ranks.is_first:
            self._progress.captured(*(totals[name] - self._shown[name] for name in ("samples", "tokens")))
            self._shown = totals

    def note(self, text: str) -> None:
        self._progress.note(f"rank {self._ranks.rank}: {text}")
