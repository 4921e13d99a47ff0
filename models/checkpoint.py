"""The files a model is loaded from: whole, readable, and recognised again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from .errors import UsageError

# Of each tensor, as many bytes from its start and from its end.
_SAMPLE_BYTES = 1 << 10
_PIECES = 1024


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
    """A sha256 over names, sizes and headers of the weight files in `folder` and a sample of every tensor in them.

    Equal weights give equal fingerprints; so would weights that differ only in values between the samples, which no training
    leaves alone.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files or sorted(
        p for p in folder.iterdir() if p.name.startswith("pytorch_model") or p.suffix == ".gguf"
    ):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _samples(file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def config_hash(config: Any) -> str:
    """sha256 of a model config, without where it was loaded from and what wrote it."""
    fields = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version", "dtype", "_attn_implementation_internal"):
        fields.pop(name, None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _samples(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """(start, length): the header, and the first and the last bytes of each tensor; of other files, pieces at even distances."""
    prefix = int.from_bytes(file.read(8), "little")
    if not 2 <= prefix <= size - 8:
        yield from ((size * i // _PIECES, _SAMPLE_BYTES) for i in range(_PIECES))
        return
    header = json.loads(file.read(prefix))
    yield 0, 8 + prefix
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            length = min(_SAMPLE_BYTES, stop - start)
            yield 8 + prefix + start, length
            yield 8 + prefix + stop - length, length


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{index} is no index of weight files: {error!r}.") from error
    return dict(weight_map)
