"""Several processes that talk over gloo, on one core each."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(work: Callable[..., None], world_size: int, folder: Path, *args: Any) -> None:
    """Run `work(rank, folder, *args)` in `world_size` processes that form one group; raises if one of them does."""
    mp.start_processes(_joined, args=(work, world_size, folder, args), nprocs=world_size, start_method="spawn")


def _joined(rank: int, work: Callable[..., None], world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        work(rank, folder, *args)
    finally:
        dist.destroy_process_group()
