"""The files a model is loaded from: whole, readable, and recognised again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import UsageError

# Of each weight file: its header, and as many bytes from its start, middle and end. Fine-tuned twins share every name, shape
# and size, but not these bytes.
_SAMPLE_BYTES = 1 << 16


class CheckpointError(UsageError):
    """A model folder whose weights are not all there."""


def check_files(folder: Path) -> None:
    """See that every weight file of a local model folder exists and opens.

    Raises:
        CheckpointError: a file that an index names is missing, or a safetensors file does not open.
    """
    for index in sorted(folder.glob("*.index.json")):
        for name in sorted(set(_weight_map(index).values())):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{index} names {name}, which is not in {folder}; the model's download is incomplete."
                )
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be opened ({error}); fetch the model again.") from error


def fingerprint(folder: Path) -> str:
    """A sha256 over names, sizes, headers and samples of the weight files in `folder`: equal weights, equal fingerprint."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in _sample_starts(file.read(8), size):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def config_hash(config: Any) -> str:
    """sha256 of a model config, without where it was loaded from and what wrote it."""
    fields = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version", "dtype", "_attn_implementation_internal"):
        fields.pop(name, None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _sample_starts(prefix: bytes, size: int) -> list[int]:
    header = min(int.from_bytes(prefix, "little"), size)
    data = 8 + header if header < size else 0
    return [0, data, (data + size) // 2, max(data, size - _SAMPLE_BYTES)]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{index} is no index of weight files: {error!r}.") from error
    return dict(weight_map)
