"""The processes that hold one copy of the model together, each a part of every layer: who leads, and how they keep step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from ....models.errors import HiddentapError, RunError, UsageError
from .ranks import RankError, Ranks

# The others wait for the leader as long as its disk takes; a process that dies is noticed by its closed connections.
_PATIENCE = timedelta(days=7)
# After a forward that did not fit, all of them are done with what they had begun within this, or never.
_SETTLED_WITHIN_S = 120.0
_LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused")


@dataclass(frozen=True)
class TensorGroup:
    """This process among those of its copy of the model; a copy of its own by default. The first member leads and writes."""

    member: int = 0
    size: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        return self.member == 0

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Broadcast the leader's `numbers`, an int64 tensor, to every member; elsewhere only its shape counts."""
        if self.control is not None:
            dist.broadcast(numbers, group_src=0, group=self.control)
        return numbers

    def most(self, numbers: list[int], *, soon: bool = False) -> list[int]:
        """Return the largest of each of `numbers` over the members.

        Raises:
            RunError: with `soon`, some member did not come to this point in time.
        """
        if self.control is None:
            return numbers
        largest, options = torch.tensor(numbers), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if soon:  # of the operation and not of waiting for it: one that goes on would keep the group from being left
            options.timeout = timedelta(seconds=_SETTLED_WITHIN_S)
        try:
            self.control.allreduce([largest], options).wait()
        except RuntimeError as error:
            if soon and "timed out" in str(error).lower():
                raise _out_of_step() from error
            raise
        found: list[int] = largest.tolist()
        return found

    def settle(self, device: torch.device) -> None:
        """Wait, after a forward that ran out of memory, until every member's device has finished its work.

        Raises:
            RunError: some ran out where others did not, so the others wait for them inside the forward for ever.
        """
        if device.type != "cpu":
            begun, end = torch.accelerator.current_stream(device).record_event(), time.monotonic() + _SETTLED_WITHIN_S
            while not begun.query():
                if time.monotonic() > end:
                    raise _out_of_step()
                time.sleep(0.01)
        self.most([0], soon=True)


@contextmanager
def tensor_group(ranks: Ranks, size: int) -> Iterator[TensorGroup]:
    """Join this rank to its group: ranks 0 to size-1 are the first group, and so on.

    Raises:
        UsageError: the ranks do not make whole groups, or torch.distributed is in use already.
        RankError: inside the block, another process failed or is gone, which showed in a collective of the group.
    """
    if size == 1:
        yield TensorGroup()
        return
    if ranks.store is None or ranks.size % size:
        raise UsageError(
            f"tp={size} spreads the model over {size} processes, and this run has {ranks.size}; start {size}, or a multiple, "
            f"with torchrun: torchrun --nproc-per-node {size} -m hiddentap capture ... --tp {size}"
        )
    if dist.is_initialized():
        raise UsageError("tp makes process groups of its own; call torch.distributed.destroy_process_group() before.")
    group, member = divmod(ranks.rank, size)
    store = PrefixStore(f"tensor group {group}", ranks.store)
    dist.init_process_group(_backend(ranks), store=store, rank=member, world_size=size)
    try:
        with ranks.failing_together(), _losses_explained(ranks):
            yield TensorGroup(member, size, dist.new_group(backend="gloo", timeout=_PATIENCE))
    finally:
        dist.destroy_process_group()


def _backend(ranks: Ranks) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    torch.accelerator.set_device_index(ranks.local_rank)
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


@contextmanager
def _losses_explained(ranks: Ranks) -> Iterator[None]:
    """Raise the reason of the process that failed, if a collective broke because of it."""
    try:
        yield
    except HiddentapError:
        raise
    except RuntimeError as error:
        ranks.require_no_failure()
        if any(words in str(error).lower() for words in _LOST):
            raise RankError(
                f"a process of this one's tensor-parallel group is gone ({str(error).splitlines()[0]}); run the same command "
                "again to go on from here"
            ) from error
        raise


def _out_of_step() -> RunError:
    return RunError(
        "one process of a tensor-parallel group ran out of memory where the others did not, so they cannot try a smaller batch "
        "together; run again with a lower --batch-tokens."
    )
