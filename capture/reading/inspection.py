"""Contents of a folder or of one shard, from its own headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...models.errors import UsageError
from ..store import Column, Manifest, OutputFolder, Shard, ShardError
from ..store.diskio import require_folder
from ..store.folder import MANIFEST_FILE


def inspect_capture(path: str | Path) -> dict[str, Any]:
    """Return the contents of a capture folder, or of one shard file, from its headers; needs torch, numpy and safetensors alone.

    Returns:
        The values of ``hiddentap inspect --json``: path, shards, bytes, samples, rows, rejected, complete (None without a
        manifest), columns (name -> shape without R, dtype), metadata of the first shard, and broken: shard files that cannot be
        read, each with its error; finish_reasons (why answers ended, counted; None where nothing was generated).

    Raises:
        UsageError: there is no such path, or no sealed shard.

    Example:
        >>> found = inspect_capture("OUT")
        >>> found["samples"], found["complete"], found["columns"]["aux_hidden_states"]
        (5, True, {'shape': (3, 32), 'dtype': 'float32'})
    """
    path = Path(path)
    shards, broken = readable_shards(path)
    return {
        "path": path,
        "shards": len(shards),
        "bytes": sum(shard.nbytes for shard in shards),
        "samples": sum(shard.M for shard in shards),
        "rows": sum(shard.R for shard in shards),
        "rejected": sum(len(shard.rejects) for shard in shards),
        "complete": is_complete(path),
        "columns": {column.name: {"shape": column.shape, "dtype": dtype_name(column)} for column in shards[0].columns},
        "metadata": shards[0].metadata,
        "broken": [str(error) for error in broken],
        "finish_reasons": finish_reasons(path),
    }


def readable_shards(path: Path) -> tuple[list[Shard], list[ShardError]]:
    """Return the sealed shards of a folder, or the shard that `path` is, in order, and the errors of those that cannot be read.

    Raises:
        UsageError: nothing is there, or no sealed shard.
    """
    if path.is_file():
        return [Shard(path)], []
    require_folder(path, "the folder of a capture, or a shard")
    sealed = OutputFolder(path).sealed_shards()
    if not sealed.shards:
        raise UsageError(f"{path} holds no sealed shard.")
    return [sealed.shards[index] for index in sorted(sealed.shards)], list(sealed.broken.values())


def is_complete(path: Path) -> bool | None:
    """Return whether the capture is complete; None where no manifest says."""
    manifest = path / "manifest.json"
    return Manifest.read(manifest).complete if manifest.is_file() else None


def finish_reasons(path: Path) -> dict[str, int] | None:
    """Return why the answers of a finished generation ended, counted; None where a folder has none and for a shard.

    A generation counts requests in its own manifest; a regeneration counts turns in the manifest of its answers.
    """
    folder = OutputFolder(path)
    for place in (folder.manifest_path, folder.answers / MANIFEST_FILE):
        if place.is_file() and "finish_reasons" in (counts := Manifest.read(place).counts):
            return dict(counts["finish_reasons"])
    return None


def dtype_name(column: Column) -> str:
    """Return a column's dtype without ``torch.``."""
    return str(column.dtype).removeprefix("torch.")
