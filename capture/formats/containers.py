"""The files that PyTorch trainers read: `torch.save` containers, written whole or not at all, read without code."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from ..store.diskio import full_disk_explained
from .errors import LayoutError

PARTIAL = ".partial"


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let `write` fill a file that gets its name once it is on disk; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with full_disk_explained(path, 1), partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


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


def load_container(path: Path) -> dict[str, Any]:
    """The dict in a container, which may hold tensors and plain values alone.

    Raises:
        LayoutError: the file is damaged, no container, holds something that would run code, or is no dict.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as packed:
                values = torch.load(io.BytesIO(packed.read()), weights_only=True, map_location="cpu")
        else:
            values = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise LayoutError(f"{path} cannot be read as a container of tensors: {reason}") from error
    if not isinstance(values, dict):
        raise LayoutError(f"{path}: expected a dict, found {type(values).__name__}.")
    return values


def tensor_of(values: Mapping[str, Any], key: str, path: Path) -> Tensor:
    """The tensor under `key`; LayoutError where there is none."""
    found = values.get(key)
    if not isinstance(found, Tensor):
        raise LayoutError(f"{path}: expected a tensor {key!r}, found {sorted(map(str, values))}.")
    return found
