"""The one interface of all trainers' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...models.layer_ids import Convention
from .final_state import Norm
from .job import ExportJob
from .selection import Rule
from .settings import ExportSettings, ImportSettings


class Piece(NamedTuple):
    """A file that is written whole, and the samples `first` to `stop - 1` that it holds."""

    path: Path
    first: int
    stop: int


class Exporter(Protocol):
    """Writes one layout. Made before anything is written, so that it can refuse."""

    def pieces(self) -> Iterator[Piece]:
        """Yield every file with rows, in sample order; the same in every run on the same request."""

    def write(self, piece: Piece) -> None:
        """Make the file of `piece`; under its name it is whole or absent."""

    def finish(self) -> None:
        """Write what the layout has beside the rows, once all pieces are there."""


@dataclass(frozen=True)
class Stated:
    """Statements of foreign files about themselves; None for what they leave out.

    Attributes:
        layer_ids: in slot order, under `convention`; -1 is the embeddings. n: decoder layers. model: the model's name.
    """

    convention: Convention = "layer_output"
    layer_ids: tuple[int, ...] | None = None
    n: int | None = None
    model: str | None = None


class ForeignSample(NamedTuple):
    """One sample as a layout holds it, without padding.

    input_ids: (S,) any integers. loss_mask: (S,) any numbers. aux: (S, K * H) or None. final: (S, H) or None.
    sample_id: where the layout stores one.
    """

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor | None
    final: Tensor | None
    sample_id: str | None = None


class Reader(Protocol):
    """Reads one layout.

    Attributes:
        stated: what the files say. final: what their last hidden states are, None where there are none.
    """

    stated: Stated
    final: Norm | None

    def __len__(self) -> int: ...

    def read(self, number: int) -> ForeignSample:
        """Sample `number`; raises LayoutError for files that are not of the layout, SampleError for one bad sample."""


@dataclass(frozen=True)
class Format:
    """A layout by its name.

    Attributes:
        algorithms: those that it differs by; () where it is one for all.
        options: the fields of `ExportSettings` that it knows.
        rule: which samples it can hold.
    """

    name: str
    exporter: Callable[[ExportJob], Exporter]
    reader: Callable[[ImportSettings], Reader]
    algorithms: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()
    rule: Callable[[ExportSettings], Rule] = lambda settings: Rule(settings.min_supervised)


class SampleFiles:
    """The pieces of a layout with one file per sample."""

    def __init__(self, job: ExportJob, path: Callable[[int], Path]) -> None:
        self._job, self._path = job, path

    def pieces(self) -> Iterator[Piece]:
        return (Piece(self._path(number), number, number + 1) for number in range(len(self._job)))


def numbered_shards(job: ExportJob, shard_size: int, path: Callable[[int], Path]) -> Iterator[Piece]:
    """Yield the pieces of a layout with `shard_size` samples a file."""
    for shard, first in enumerate(range(0, len(job), shard_size)):
        yield Piece(path(shard), first, min(first + shard_size, len(job)))


def int64(values: Tensor) -> Tensor:
    """Return the tensor as the int64 of trainers' files."""
    return values.to(torch.int64)
