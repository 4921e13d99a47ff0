"""A Ray cluster to run on: one that is there, or one on this machine for as long as the run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ....models.errors import UsageError
from ..settings import RayWorkers

# What passes through Ray's own memory are numbers of shards and progress; rows go from the worker to the disk. Ray takes no less.
_OBJECT_STORE_BYTES = 80_000_000
_OF_THIS_MACHINE = "local"


@dataclass(frozen=True)
class Share:
    """The share of the cluster that each worker gets."""

    cpus: int
    gpus: float

    @property
    def options(self) -> dict[str, float]:
        """Return the options of Ray's actors."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def require_ray() -> ModuleType:
    """Return the module `ray` without usage statistics; raise UsageError naming the extra if it is missing."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"engine ray needs Ray ({error}); install it with `pip install 'hiddentap[ray]'`.") from error
    module: ModuleType = ray
    return module


@contextmanager
def connected(workers: RayWorkers) -> Iterator[Share]:
    """Connected to Ray inside the block; what each of `workers` gets.

    A connection that the caller made before is used and kept.

    Raises:
        UsageError: no cluster at the address, or this machine has fewer GPUs than the workers need.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield _share(ray, workers, alone=False)
        return
    address = workers.address or os.environ.get("RAY_ADDRESS") or _OF_THIS_MACHINE
    with _own_signals():
        _connect(ray, address, workers)
    try:
        yield _share(ray, workers, alone=address == _OF_THIS_MACHINE)
    finally:
        ray.shutdown()


def on_this_machine() -> Any:
    """Return the placement on this machine, for an actor that must live as long as the run."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(require_ray().get_runtime_context().get_node_id(), soft=False)


def _connect(ray: Any, address: str, workers: RayWorkers) -> None:
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == _OF_THIS_MACHINE:
        options["include_dashboard"] = False
        options["object_store_memory"] = _OBJECT_STORE_BYTES
        options["num_cpus"] = max(_cpus(), workers.count)
    try:
        ray.init(**options)
    except (ConnectionError, ValueError) as error:
        raise UsageError(f"no Ray cluster can be used at {address!r}: {error}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of SIGINT and SIGTERM: Ray sets one that ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _share(ray: Any, workers: RayWorkers, *, alone: bool) -> Share:
    there = ray.cluster_resources()
    gpus_there = there.get("GPU", 0.0)
    gpus = workers.gpus if workers.gpus is not None else float(gpus_there > 0)
    if alone and gpus * workers.count > gpus_there:
        raise UsageError(
            f"{workers.count} Ray workers of {gpus:g} GPU(s) were asked for, and this machine has {gpus_there:g}; "
            "take fewer, or name a cluster."
        )
    # Without GPUs the cores are what computes: Ray gives a worker as many threads as cores.
    cpus = max(1, _cpus() // workers.count) if alone and not gpus else 1
    return Share(cpus, gpus)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
