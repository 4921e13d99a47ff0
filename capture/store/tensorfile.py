"""A safetensors file that holds one tensor and grows by entries, for the plan."""

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .columns import DTYPE_NAMES
from .diskio import Buffer, UnsealedFile, array_bytes, naming, open_regular, read_all
from .errors import ShardError
from .header import TensorEntry, build_header, read_header

# Room for one tensor's entry; 8 + 248 bytes put the data at a multiple of 64.
_HEADER_LENGTH = 248
_WRITE_BYTES = 1 << 20


class TensorFileWriter:
    """Appends entries of one 1-dimensional tensor: `append`, then `seal` or `discard`."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._file = UnsealedFile(path)
        self._size = 0
        self._pending = bytearray()
        self._sum = 0

    def append(self, data: Buffer) -> None:
        """Add the bytes of whole entries."""
        self._pending += data
        if len(self._pending) >= _WRITE_BYTES:
            self._write_pending()

    def written(self) -> bytes:
        """Return the bytes of all entries so far."""
        self._write_pending()
        data = bytearray(self._size)
        self._file.read(memoryview(data), 8 + _HEADER_LENGTH)
        return bytes(data)

    def seal(self) -> dict[str, int]:
        """Make the file readable; returns its entries and the CRC-32 of its data."""
        self._write_pending()
        count = self._size // self._dtype.itemsize
        entry = TensorEntry(self._file.target.stem, self._dtype, (count,), 0, self._size)
        self._file.seal(build_header([entry], None, length=_HEADER_LENGTH))
        return {"entries": count, "crc32": self._sum}

    def discard(self) -> None:
        """Remove the file unless it is sealed."""
        self._file.discard()

    def _write_pending(self) -> None:
        self._file.write(self._pending, 8 + _HEADER_LENGTH + self._size)
        self._sum = zlib.crc32(self._pending, self._sum)
        self._size += len(self._pending)
        self._pending.clear()


class TensorFile:
    """Reads entries of such a file.

    Raises:
        ShardError: it is missing, not sealed, cut, or not of the dtype and length expected. FileAccessError: it cannot be
            opened or read now.
    """

    def __init__(self, path: Path, dtype: torch.dtype, entries: int) -> None:
        self.path = path
        self._fd: int | None = None
        self._fd = open_regular(path)
        header = read_header(self._fd, path)
        found = header.entries.get(path.stem)
        if found is None or found.dtype != dtype or found.shape != (entries,):
            raise ShardError(f"{path}: expected {entries} entries of {DTYPE_NAMES[dtype]}, found {found}.")
        self._start = header.data_start + found.start
        self._dtype = dtype
        self.entries = entries

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Entries start..stop in memory of their own."""
        array: NDArray[Any] = np.empty(stop - start, numpy_dtype(self._dtype))
        read_all(self.fd, array_bytes(array), self._start + start * self._dtype.itemsize, self.path)
        return array

    def mapped(self) -> NDArray[Any]:
        """Return all entries, read-only, paged in as they are used."""
        dtype = numpy_dtype(self._dtype)
        if self.entries == 0:
            return np.empty(0, dtype)
        with naming(self.path, "opened"):
            return np.memmap(self.path, dtype, "r", self._start, (self.entries,))

    def crc32(self) -> int:
        """CRC-32 of the data, read now."""
        value, step = 0, 1 << 20
        for start in range(0, self.entries, step):
            value = zlib.crc32(array_bytes(self.read(start, min(self.entries, start + step))), value)
        return value

    @property
    def fd(self) -> int:
        if self._fd is None:
            raise ShardError(f"{self.path}: is closed.")
        return self._fd

    def close(self) -> None:
        """Give the file handle back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()


def numpy_dtype(dtype: torch.dtype) -> "np.dtype[Any]":
    """Return the numpy dtype of the same name."""
    return np.dtype(str(dtype).removeprefix("torch."))
