"""OUT/head, written once per folder, and again where it is damaged."""

from __future__ import annotations

from pathlib import Path

import torch

from ...models.loaded_model import LoadedModel
from ..progress import Progress
from ..stored_head import head_fault, write_head
from .attached_model import AttachedModel
from .distributed.tensor_group import TensorGroup


def write_missing_head(
    folder: Path, loaded: LoadedModel, attached: AttachedModel, group: TensorGroup, progress: Progress
) -> None:
    """Write the head of the run's model, unless an earlier run on this folder did and it is whole; raises as `write_head`.

    Every member of the first group calls this: each holds a part of the head. The leader writes.
    """
    fault = head_fault(folder)
    (missing,) = group.broadcast(torch.tensor([fault is not None], dtype=torch.int64)).tolist()
    if not missing:
        return
    if fault is not None and folder.exists():
        progress.note(f"the head is written again: {fault}")
    trust = loaded.source.trust_remote_code
    write_head(folder, loaded.model, attached.norm_path, trust_remote_code=trust, write=group.leads)
