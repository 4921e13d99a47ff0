"""Read single tensors of a safetensors checkpoint, counting the bytes that are read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CheckpointError
from ..safetensors_dtypes import DTYPES
from ..stored_tensors import StoredTensor, tensors_of_file

_LINE = 64  # bytes of a cache line
_MOST_BYTES = 1 << 30  # of one read call: Linux caps a call at 2 GiB


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint, read when it is indexed with ``[...]``: what transformers' loading asks of a slice."""

    reader: CheckpointReader
    stored: StoredTensor

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self.reader.read(self.stored)

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        return self.stored.dtype

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored.dtype]


class CheckpointReader:
    """The tensors of safetensors files, each read into memory of its own when it is asked for.

    Files are read, not mapped: a mapped weight would be read from the disk in the middle of a forward, page by page.

    Attributes:
        bytes_read: bytes of tensors read so far, by every thread.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers of `files`.

        Raises:
            CheckpointError: as `tensors_of_file`, or a dtype that torch has not.
        """
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        try:
            stored = [tensor for path in files for tensor in self._opened(Path(path))]
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, LazyTensor] = {one.name: LazyTensor(self, one) for one in stored}

    def read(self, stored: StoredTensor) -> Tensor:
        """Return the values of `stored`, on the CPU.

        Raises:
            CheckpointError: the file cannot be read, ends too early, or was closed.
        """
        raw = _placed_as_mapped(stored)
        values: Any = raw.numpy()  # a buffer; its type says so from Python 3.12 on
        view = memoryview(values)
        descriptor = self._descriptors.get(stored.file)
        if descriptor is None:
            raise CheckpointError(
                f"{stored.file}: {stored.name} cannot be read after the file was closed; load the model again."
            )
        done = 0
        while done < stored.bytes:
            part = view[done : done + _MOST_BYTES]
            try:
                got = os.preadv(descriptor, [part], stored.start + done)
            except OSError as error:
                raise CheckpointError(f"{stored.file}: reading {stored.name} failed: {error.strerror}.") from error
            if got == 0:
                raise CheckpointError(f"{stored.file} ends inside {stored.name}; fetch the model again.")
            done += got
        with self._lock:
            self.bytes_read += done
        return raw.view(DTYPES[stored.dtype]).reshape(stored.shape)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    @contextmanager
    def closing(self) -> Iterator[CheckpointReader]:
        """Close the files when the block ends."""
        try:
            yield self
        finally:
            self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptors"):
            self.close()

    def _opened(self, path: Path) -> Iterator[StoredTensor]:
        for tensor in tensors_of_file(path):
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: {tensor.name} has dtype {tensor.dtype!r}, which is not one of {', '.join(DTYPES)}."
                )
            yield tensor
        descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):  # Linux then reads further ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _placed_as_mapped(stored: StoredTensor) -> Tensor:
    """Return (bytes,) uint8 whose address lies to a cache line as that of a map of the file would.

    CPU kernels round some products (a linear layer with one output, say) by the alignment of the weight, and transformers maps
    its files: the bits of a plain forward need the same alignment.
    """
    raw = torch.empty(stored.bytes + _LINE, dtype=torch.uint8)
    first = (stored.start - raw.data_ptr()) % _LINE
    return raw[first : first + stored.bytes]
