"""OUT/head, written once per folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ...models.head import DESCRIPTION_FILE, save_head
from ...models.loading import LoadedModel
from .hugging_face import AttachedModel
from .tensor_group import TensorGroup


def write_head(folder: Path, loaded: LoadedModel, attached: AttachedModel, group: TensorGroup) -> None:
    """Write the head of the run's model, unless an earlier run on this folder did; raises `HeadError`.

    Every member of the first group calls this: each holds a part of the head. The leader writes.
    """
    (missing,) = group.told(torch.tensor([not (folder / DESCRIPTION_FILE).exists()], dtype=torch.int64)).tolist()
    if missing:
        trust = loaded.source.trust_remote_code
        save_head(folder, loaded.model, attached.norm_path, trust_remote_code=trust, write=group.leads)
