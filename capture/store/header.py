"""The safetensors header: built before the data is there, and read back with every claim checked."""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...models.errors import RunError
from .columns import DTYPE_NAMES, DTYPES, item_bytes
from .diskio import naming, read_bytes
from .errors import ShardError

METADATA_KEY = "hiddentap"
ALIGNMENT = 64
MAX_HEADER = 100_000_000  # the library refuses more, on writing and on reading
MAX_SIZE = 1 << 48  # of one dimension: an empty tensor's other dimensions fill no byte and would be believed
# What reading JSON that somebody else wrote can raise: it may be anything.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor; `start` and `stop` are bytes counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A header as read: `text` is our one metadata value (None in files of others), `data_start` a file offset."""

    entries: dict[str, TensorEntry]
    text: str | None
    raw: bytes
    data_start: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data_start + max((entry.stop for entry in self.entries.values()), default=0)


def place_tensors(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Lay tensors end to end, widest dtype first and then by name: each starts at a multiple of its item size."""
    entries: list[TensorEntry] = []
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-tensor[1].itemsize, tensor[0])):
        size = item_bytes(dtype, shape)
        entries.append(TensorEntry(name, dtype, shape, position, position + size))
        position += size
    return tuple(entries)


def build_header(entries: Iterable[TensorEntry], text: str | None, *, length: int | None = None) -> bytes:
    """Return the JSON part of a header, padded with spaces so that the data starts at a multiple of 64 bytes.

    text: the value of our one metadata key, or None for no metadata.
    length: pad to exactly this many bytes instead.
    """
    head: dict[str, Any] = {} if text is None else {"__metadata__": {METADATA_KEY: text}}
    for entry in entries:
        head[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    raw = json.dumps(head, separators=(",", ":")).encode("ascii")
    wanted = length if length is not None else len(raw) + -(len(raw) + 8) % ALIGNMENT
    if len(raw) > wanted or wanted > MAX_HEADER:
        limit = min(wanted, MAX_HEADER)
        raise RunError(f"the header needs {len(raw)} bytes and {limit} are allowed; store less metadata or fewer rows.")
    return raw.ljust(wanted)


def read_header(fd: int, path: Path) -> Header:
    """Read and check the header of an open file.

    Raises ShardError naming `path`: not sealed, header cut or damaged, file shorter or longer than the header says.
    """
    with naming(path, "read"):
        size = os.fstat(fd).st_size
    if size < 8:
        raise ShardError(f"{path}: {size} bytes are too few for a safetensors file; remove it and capture again.")
    (length,) = struct.unpack("<Q", read_bytes(fd, 8, 0, path))
    if length == 0:
        raise ShardError(f"{path}: not sealed (its header length is zero): the writer was stopped before the end.")
    if length > MAX_HEADER or 8 + length > size:
        if size > 8 and read_bytes(fd, 1, 8, path) != b"{":
            raise ShardError(f"{path}: is no safetensors file: no header begins at its byte 8.")
        raise ShardError(f"{path}: the header is cut: it should hold {length} bytes and the file has {size} in all.")
    raw = read_bytes(fd, length, 8, path)
    entries, text = _parse(raw, path)
    _check_extent(entries, 8 + length, size, path)
    return Header(entries, text, raw, 8 + length)


def _parse(raw: bytes, path: Path) -> tuple[dict[str, TensorEntry], str | None]:
    try:
        head = json.loads(raw)
        metadata = head.pop("__metadata__", {})
        entries = {name: _entry(name, value) for name, value in head.items()}
        text = metadata.get(METADATA_KEY)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the metadata {METADATA_KEY!r} is no text")
    except MALFORMED as error:
        raise ShardError(f"{path}: the header is damaged ({error!r}).") from error
    return entries, text


def _entry(name: str, value: dict[str, Any]) -> TensorEntry:
    start, stop = value["data_offsets"]
    shape = tuple(int(size) for size in value["shape"])
    entry = TensorEntry(name, DTYPES[value["dtype"]], shape, int(start), int(stop))
    if (
        min((*shape, 0)) < 0
        or max((*shape, 0)) > MAX_SIZE
        or entry.stop - entry.start != item_bytes(entry.dtype, shape)
    ):
        raise ValueError(f"tensor {name!r} of shape {shape} does not fill bytes {start} to {stop}")
    return entry


def _check_extent(entries: dict[str, TensorEntry], data_start: int, size: int, path: Path) -> None:
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            raise ShardError(
                f"{path}: the header is damaged: tensor {entry.name!r} starts at {entry.start}, {position} was due."
            )
        position = entry.stop
    expected = data_start + position
    if size < expected:
        raise ShardError(f"{path}: truncated: the header speaks of {expected} bytes and the file has {size}.")
    if size > expected:
        raise ShardError(
            f"{path}: {size - expected} bytes too many after the last tensor ({size}, expected {expected})."
        )
