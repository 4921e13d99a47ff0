"""Other tools' strategies in a process of their own, as they run without this project: a run of it changes how the process keeps
its freed memory, which would be to their advantage.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy import ndarray

from . import other_tools
from .rounds import Stopwatch


@dataclass(frozen=True)
class OtherProcess:
    """The process, with a model of its own."""

    pool: ProcessPoolExecutor

    def seconds(self, strategy: str, ids: Sequence[ndarray[Any, Any]], layers: Sequence[int], folder: Path) -> float:
        """How long `strategy` takes for samples of these token ids; `folder` is for the files it writes, and gone afterwards."""
        return self.pool.submit(_seconds, strategy, ids, layers, folder).result()


@contextmanager
def other_process(model: str, dtype: str, device: torch.device) -> Iterator[OtherProcess]:
    """The process lives as long as the block."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning, _load, (model, dtype, device, torch.get_num_threads())) as pool:
        yield OtherProcess(pool)


_loaded: list[Any] = []


def _load(model: str, dtype: str, device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    _loaded.append(other_tools.load(model, dtype, device))


def _seconds(name: str, ids: Sequence[ndarray[Any, Any]], layers: Sequence[int], folder: Path) -> float:
    (model,) = _loaded
    strategy = other_tools.strategies(model, [torch.from_numpy(sample) for sample in ids], layers, folder)[name]
    folder.mkdir()
    watch = Stopwatch(model.device)
    with watch.running():
        strategy()
    shutil.rmtree(folder)
    return watch.seconds
