"""One column's rows of a growing shard, in the order they came."""

import os
import zlib
from pathlib import Path

from ...models.errors import RunError
from .columns import Column
from .diskio import COPY_BYTES, UnsealedFile, create_file, read_all, write_all

_WRITE_BYTES = 1 << 20


class Spool:
    """A file that takes the rows of interleaved samples and hands them back sample by sample.

    Per sample: how many entries it has (`counts`; `total` of all), and the stretches of the file that hold them.
    Neighboring stretches of one sample are one, so a sample written alone costs one copy.
    """

    def __init__(self, target: Path, column: Column) -> None:
        self.column = column
        self.counts: list[int] = []
        self.total = 0
        self._sums: list[int] = []
        self._stretches: list[list[tuple[int, int]]] = []
        self._size = 0
        self._pending = bytearray()
        self._path = target.with_name(f"{target.name}.{column.name}.spool")
        self._fd: int | None = create_file(self._path)

    @property
    def fd(self) -> int:
        if self._fd is None:
            raise RunError(f"{self._path} is closed: its shard was sealed or discarded.")
        return self._fd

    def begin(self) -> None:
        """Make room for one more sample."""
        self.counts.append(0)
        self._sums.append(0)
        self._stretches.append([])

    def append(self, sample: int, data: memoryview) -> None:
        """Add whole entries at the end of a sample."""
        if not len(data):
            return
        # A decode step appends a few rows at a time: gathered into one write.
        self._pending += data
        if len(self._pending) >= _WRITE_BYTES:
            self._write_pending(self._size + len(data))
        count = len(data) // self.column.row_bytes
        self.counts[sample] += count
        self.total += count
        self._sums[sample] = zlib.crc32(data, self._sums[sample])
        stretches, stop = self._stretches[sample], self._size + len(data)
        if stretches and stretches[-1][1] == self._size:
            stretches[-1] = (stretches[-1][0], stop)
        else:
            stretches.append((self._size, stop))
        self._size = stop

    def move(self, samples: list[int], file: UnsealedFile, position: int) -> list[int]:
        """Copy these samples end to end into `file` at `position`, drop the spool, return each sample's CRC-32."""
        self._write_pending(self._size)
        pieces = [stretch for sample in samples for stretch in self._stretches[sample]]
        buffer = bytearray()
        for start, stop in pieces:
            if stop - start > COPY_BYTES:
                position = self._flush(buffer, file, position)
                file.copy_from(self.fd, start, position, stop - start, self._path)
                position += stop - start
                continue
            part = bytearray(stop - start)
            read_all(self.fd, memoryview(part), start, self._path)
            buffer += part
            if len(buffer) >= COPY_BYTES:
                position = self._flush(buffer, file, position)
        self._flush(buffer, file, position)
        self.discard()
        return [self._sums[sample] for sample in samples]

    def discard(self) -> None:
        """Close and remove the file; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._path.unlink(missing_ok=True)

    def _write_pending(self, size: int) -> None:
        write_all(self.fd, self._pending, size - len(self._pending), self._path)
        self._pending.clear()

    @staticmethod
    def _flush(buffer: bytearray, file: UnsealedFile, position: int) -> int:
        file.write(buffer, position)
        position += len(buffer)
        buffer.clear()
        return position
