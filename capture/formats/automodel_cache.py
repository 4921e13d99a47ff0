"""The common part of Automodel's two caches: shards of padded samples, numbered without a gap, and a manifest.

T: padded length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...models.checked_record import Value, list_of, of_type
from ..store.diskio import write_atomically
from .errors import FormatError, LayoutError
from .job import ExportJob

SHARD_SIZE = 64
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
EMPTY_TEMPLATE = hashlib.sha256(b"").hexdigest()


def cache_dtype(job: ExportJob) -> str:
    """Return the stored dtype as the manifest calls it."""
    if job.captured.dtype not in DTYPE_NAMES:
        raise FormatError(
            f"Automodel's caches hold {', '.join(DTYPE_NAMES.values())}; this capture holds {job.captured.dtype}."
        )
    return DTYPE_NAMES[job.captured.dtype]


def padded_length(job: ExportJob) -> int:
    """T: what was asked for, or the longest sample's length."""
    return job.settings.seq_length or int(job.selection.lengths.max())


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:06d}.safetensors"


def data_names(job: ExportJob) -> str:
    """Return the capture's input, as the manifests name it."""
    return ",".join(map(str, job.captured.about.sources))


def template_sha256(job: ExportJob) -> str:
    """SHA-256 of the chat template's text."""
    tokenisation = job.captured.about.tokenisation
    return str(tokenisation.get("template_sha256") or EMPTY_TEMPLATE)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n")


class CacheFiles:
    """The shards of a cache, opened one at a time.

    Raises:
        LayoutError: no manifest, one of another version or not complete, or a shard that is missing.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._path = path = folder / "manifest.json"
        try:
            self.manifest: dict[str, Any] = of_type(dict, json.loads(path.read_bytes()))
            found = self.manifest["format_version"]
            self._shard_size = of_type(int, self.manifest["shard_size"])
            self.samples = of_type(int, self.manifest["num_samples"])
            if self._shard_size < 1 or self.samples < 0:
                raise ValueError(f"{self.samples} samples in shards of {self._shard_size}")
        except FileNotFoundError as error:
            raise LayoutError(f"{folder} is no Automodel cache: it holds no {path.name}.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._no_manifest(error) from error
        if found != version:
            raise LayoutError(f"{path}: expected format_version {version}, found {found}.")
        if self.manifest.get("complete", True) is not True:
            raise LayoutError(f"{path}: the cache is not complete; finish it by what makes it.")
        missing = [s for s in range(-(-self.samples // self._shard_size)) if not shard_path(folder, s).is_file()]
        if missing:
            raise LayoutError(f"{folder}: {shard_path(folder, missing[0]).name} is missing; {len(missing)} shards are.")
        self._opened: tuple[int, Any] | None = None

    def entry(self, name: str, kind: type[Value]) -> Value | None:
        """Return what the manifest holds under `name`, None where it is absent or null; LayoutError where it is no `kind`."""
        value = self.manifest.get(name)
        try:
            return None if value is None else of_type(kind, value)
        except TypeError as error:
            raise self._no_manifest(f"{name}: {error}") from error

    def layer_ids(self, name: str) -> tuple[int, ...]:
        """Return the layer ids under `name`, none where it is absent or null; LayoutError where it is no list of integers."""
        try:
            return list_of(int, self.entry(name, list) or [])
        except TypeError as error:
            raise self._no_manifest(f"{name}: {error}") from error

    def _no_manifest(self, problem: object) -> LayoutError:
        said = repr(problem) if isinstance(problem, Exception) else problem
        return LayoutError(f"{self._path} is no manifest of an Automodel cache: {said}")

    def sample(self, number: int, *keys: str) -> list[Tensor]:
        """Return (T, ...) of each key."""
        shard, place = divmod(number, self._shard_size)
        try:
            if self._opened is None or self._opened[0] != shard:
                self._opened = (shard, safe_open(shard_path(self._folder, shard), framework="pt"))
            return [self._opened[1].get_slice(key)[place] for key in keys]
        except (SafetensorError, KeyError, IndexError, OSError) as error:
            raise LayoutError(f"{shard_path(self._folder, shard)}: expected {', '.join(keys)}: {error}") from error
