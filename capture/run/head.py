"""OUT/head, written once per folder."""

from __future__ import annotations

from pathlib import Path

from ...models.head import DESCRIPTION_FILE, save_head
from ...models.loading import LoadedModel
from .hugging_face import AttachedModel


def write_head(folder: Path, loaded: LoadedModel, attached: AttachedModel) -> None:
    """Write the head of the run's model, unless an earlier run on this folder did; raises `HeadError`."""
    if not (folder / DESCRIPTION_FILE).exists():
        save_head(folder, loaded.model, attached.norm_path, trust_remote_code=loaded.source.trust_remote_code)
