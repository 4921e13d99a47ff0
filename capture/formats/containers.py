"""The files that PyTorch trainers read: `torch.save` containers, written whole or not at all, read without code."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from ...models.errors import RunError
from ..store.diskio import file_error, naming
from .errors import LayoutError

PARTIAL = ".partial"


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let `write` fill a file that gets its name once it is on disk; its folder is made where it is missing."""
    with naming(path.parent, "made"):
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with naming(path, "written"):
        file = partial.open("wb")
    try:
        named = _NamedFile(path, file)
        try:
            write(cast(IO[bytes], named))
        except (OSError, RuntimeError) as error:
            raise (named.refused or error) from error
        with naming(path, "written"):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            partial.replace(path)
    except BaseException:
        with suppress(OSError):  # it would write the rest of a file that goes
            file.close()
        partial.unlink(missing_ok=True)
        raise


class _NamedFile:
    """A file that names itself in what the system refuses it, and keeps that: `torch.save` ends with words of its own then.

    What `write` meets in other files is left as it is.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self.refused: RunError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.refused = file_error(self._path, "written", error)
            raise self.refused from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def save_container(path: Path, values: Mapping[Any, Any]) -> None:
    """`torch.save` of a dict of tensors and plain values; gzipped where the name ends in ``.gz``."""

    def write(file: IO[bytes]) -> None:
        if path.suffix != ".gz":
            torch.save(dict(values), file)
            return
        # No time and no name: equal rows make equal files.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            torch.save(dict(values), cast(IO[bytes], packed))

    write_whole(path, write)


# What reading bytes that are no pickle can raise, which may be anything.
_DAMAGED = (
    OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError,
    zipfile.BadZipFile,
)  # fmt: skip


def load_container(path: Path) -> dict[str, Any]:
    """Return the dict in a container, which may hold tensors and plain values alone.

    Raises:
        LayoutError: the file is damaged, no container, holds something that would run code, or is no dict.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as packed:
                values = torch.load(io.BytesIO(packed.read()), weights_only=True, map_location="cpu")
        else:
            values = torch.load(path, weights_only=True, map_location="cpu")
    except _DAMAGED as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise LayoutError(f"{path} cannot be read as a container of tensors: {reason}") from error
    if not isinstance(values, dict):
        raise LayoutError(f"{path}: expected a dict, found {type(values).__name__}.")
    return values


def tensor_of(values: Mapping[str, Any], key: str, path: Path) -> Tensor:
    """Return the tensor under `key`; LayoutError where there is none."""
    found = values.get(key)
    if not isinstance(found, Tensor):
        raise LayoutError(f"{path}: expected a tensor {key!r}, found {sorted(map(str, values))}.")
    return found
