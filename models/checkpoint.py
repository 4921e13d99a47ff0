"""The files a model is loaded from: whole, readable, and recognized again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from .checked_record import of_type
from .errors import UsageError

# Of each tensor, as many bytes from its start and from its end.
_SAMPLE_BYTES = 1 << 10
_PIECES = 1024
_SUMMED_BYTES, _SUMMING_THREADS = 16 << 20, 8


class CheckpointError(UsageError):
    """A model folder whose weights are not all there."""


def check_files(folder: Path) -> None:
    """See that every weight file of a local model folder exists and opens.

    Raises:
        CheckpointError: a file that an index names is missing, a safetensors file does not open, or there are other files alone.
    """
    if not any(_weight_files(folder)):
        for suffix, form in (("gguf", "GGUF"), ("npz", "MLX's old form")):
            if found := next(folder.glob(f"*.{suffix}"), None):
                raise CheckpointError(
                    f"{folder} holds its weights in {form} alone ({found.name}); take the release in safetensors."
                )
    for index in sorted(folder.glob("*.index.json")):
        for name in sorted(set(weight_map(index).values())):
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


def has_weights(folder: Path) -> bool:
    """Return whether a local model folder has any weight file."""
    return any(_weight_files(folder)) or any(folder.glob("*.gguf"))


def fingerprint(folder: Path) -> str:
    """Return a sha256 over names, sizes and headers of the weight files in `folder` and a sample of every tensor in them.

    Equal weights give equal fingerprints; so would weights that differ only in values between the samples, which no training
    leaves alone.
    """
    digest = hashlib.sha256()
    for path in _weight_files(folder) or sorted(folder.glob("*.gguf")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _samples(file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def weight_sums(
    folder: Path, check_stop: Callable[[], None] = lambda: None, on_read: Callable[[int, int], None] | None = None
) -> dict[str, str]:
    """CRC-32, as eight hexadecimal digits, of every byte of each weight file in `folder`, by name.

    Unlike `fingerprint` it reads all of them, as many at once as there are cores (1.9 GB/s a core).

    Args:
        check_stop: called several times a second; may raise.
        on_read: called as often, and at the end, with the bytes read and the bytes of all files.
    """
    files = _weight_files(folder) or sorted(folder.glob("*.gguf"))
    total = sum(path.stat().st_size for path in files)
    with ThreadPoolExecutor(max(_SUMMING_THREADS, len(os.sched_getaffinity(0)))) as pool:
        reading = _Reading()
        sums = [pool.submit(reading.sum_of, path) for path in files]
        try:
            check_stop()
            while wait(sums, timeout=0.1).not_done:
                check_stop()
                if on_read is not None:
                    on_read(reading.done, total)
        except BaseException:
            reading.stopped.set()
            raise
    found = {path.name: one.result() for path, one in zip(files, sums, strict=True)}
    if on_read is not None:
        on_read(reading.done, total)
    return found


def changed_weights(stated: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the differences between two results of `weight_sums`, one phrase a file."""
    return [
        f"{name} has checksum {found.get(name, 'none: it is missing')}, {stated.get(name, 'no such file')} was read then"
        for name in sorted(stated.keys() | found.keys())
        if stated.get(name) != found.get(name)
    ]


class _Reading:
    """Files that several threads read: how many bytes so far, and whether to stop."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.done = 0
        self._lock = threading.Lock()

    def sum_of(self, path: Path) -> str:
        """Return the CRC-32 of a file."""
        value = 0
        with path.open("rb") as file:
            while (block := file.read(_SUMMED_BYTES)) and not self.stopped.is_set():
                value = zlib.crc32(block, value)  # releases the interpreter's lock
                with self._lock:
                    self.done += len(block)
        return f"{value:08x}"


def config_hash(config: Any) -> str:
    """sha256 of a model config, without where it was loaded from and what wrote it."""
    fields = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version", "dtype", "_attn_implementation_internal"):
        fields.pop(name, None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*"))


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


def weight_map(index: Path) -> dict[str, str]:
    try:
        found = of_type(dict, json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return {name: of_type(str, file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of weight files: {error!r}.") from error
