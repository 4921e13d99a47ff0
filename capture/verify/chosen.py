"""The samples that are compared with the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ..store import Shard, ShardError


@dataclass(frozen=True)
class SampleName:
    """Which sample: `position` in the shard at `path`, and its id (two samples may share one)."""

    path: Path
    position: int
    sample_id: str


@dataclass(frozen=True)
class ChosenSample:
    """One sample as stored; columns: every tensor of its rows, (S, ...)."""

    name: SampleName
    columns: dict[str, Tensor]

    @property
    def input_ids(self) -> Tensor:
        """Return (S,) int32, what went into the forward."""
        return self.columns["input_ids"]

    @property
    def has_images(self) -> bool:
        """Return whether some of its rows hold image features, which its ids do not tell."""
        is_text = self.columns.get("is_text")
        return is_text is not None and not bool(is_text.all())


def chosen_places(shards: Iterable[Shard], count: int, *, each_shard: bool) -> list[tuple[Shard, int]]:
    """Shard and position of `count` samples spread evenly over all of them, first and last included.

    Samples of a shard lie in order of their length, so that short and long ones are among them.
    each_shard: one more for every shard that would have none.
    """
    ordered = sorted((shard for shard in shards if shard.M), key=lambda shard: shard.path)
    starts = np.cumsum([0, *(shard.M for shard in ordered)])
    total = int(starts[-1])
    if count < 1 or total == 0:
        return []
    chosen = {int(place) for place in np.linspace(0, total - 1, min(count, total)).round()}
    if each_shard:
        seen = {int(np.searchsorted(starts, place, side="right")) - 1 for place in chosen}
        chosen |= {int(starts[i + 1]) - 1 for i in range(len(ordered)) if i not in seen}
    found = []
    for place in sorted(chosen):
        i = int(np.searchsorted(starts, place, side="right")) - 1
        found.append((ordered[i], place - int(starts[i])))
    return found


def read_chosen(places: Sequence[tuple[Shard, int]]) -> Iterator[ChosenSample]:
    """Read them one after the other; those of a shard whose contents cannot be read are left out: checks tell of it."""
    for shard, position in places:
        try:
            with shard:
                name = SampleName(shard.path, position, shard.samples.id(position))
                sample = ChosenSample(name, shard.sample(position))
        except ShardError:
            continue
        yield sample
