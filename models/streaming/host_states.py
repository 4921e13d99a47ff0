"""States that wait in host memory while a forward is paused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_host_memory(states: Iterable[Tensor]) -> Iterator[None]:
    """Keep the values of `states` in host memory inside the block, pinned for an accelerator; their own memory is free meanwhile.

    Whoever holds one of the tensors or a view of it, as the frames of a paused forward do, holds it afterwards with the same
    bits: its storage is emptied and filled again. Nothing may look at them inside the block.
    """
    storages = {state.untyped_storage().data_ptr(): state.untyped_storage() for state in states if state.nbytes}
    moved = []
    for storage in storages.values():
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        copy.untyped_storage().copy_(storage, non_blocking=True)
        moved.append((storage, copy))
        storage.resize_(0)  # in the order of the stream: whatever takes this memory next comes after the copy
    try:
        yield
    finally:
        for storage, copy in moved:
            storage.resize_(copy.numel())
            storage.copy_(copy.untyped_storage(), non_blocking=True)
