"""Finished requests on their way into the shards of a folder."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...models.errors import UsageError
from ..identity import device_name, made_with
from ..store import (
    FINISH,
    FINISH_REASONS,
    NOT_RESUMED,
    Column,
    DiskFullError,
    FileAccessError,
    GrowingShardWriter,
    Manifest,
    OutputFolder,
    Shard,
)
from .generation.request import GenerationRequest
from .generation.request_rows import SAMPLING_MASK, GenerationColumns

FINISH_COLUMN = Column(FINISH, torch.uint8)
_READABLE = "Its sealed shards stay in {} (CapturedDataset reads them with allow_incomplete=True)."


class RequestWriter:
    """Makes shards of requests that have ended.

    A request without a row, one that was aborted and, with `drop_truncated`, one that ended by length is a reject with its
    reason.
    """

    def __init__(
        self,
        columns: GenerationColumns,
        identity: Mapping[str, Any],
        device: torch.device,
        *,
        drop_truncated: bool = False,
    ) -> None:
        """`device`: where the model runs."""
        self._columns, self._drop_truncated = columns, drop_truncated
        self._metadata = {**identity, "made_with": made_with({"device": device_name(device)}, "off")}

    def open(self, path: Path) -> GrowingShardWriter:
        """Return a writer of a new shard."""
        return GrowingShardWriter(path, (*self._columns.columns, FINISH_COLUMN), self._metadata)

    def begin(self, shard: GrowingShardWriter, request: GenerationRequest) -> int:
        """Give the request the next place in the shard; returns its handle."""
        return shard.begin(request.index, request.rid, request.prompt.source, request.prompt.line)

    def store(self, shard: GrowingShardWriter, sample: int, request: GenerationRequest) -> int:
        """Write the rows of a request that has ended; returns their bytes, 0 where it was rejected."""
        reason = self._reject_reason(request)
        if reason is not None:
            shard.reject(sample, reason, {"code": request.finish.kind if request.finish else "unfinished"})
            return 0
        rows = self._columns.dense(request) | {FINISH: _finish_column(request)}
        masks = self._columns.sampling_mask(request)
        if masks is not None:
            rows |= {f"{SAMPLING_MASK}_lengths": masks.lengths, f"{SAMPLING_MASK}_ids": masks.values}
        shard.append(sample, rows)
        return sum(column.nbytes for column in rows.values())

    def _reject_reason(self, request: GenerationRequest) -> str | None:
        if request.aborted:
            return "the request was aborted"
        if not request.token_ids:
            return f"no token was committed: {request.finish.detail if request.finish else 'it did not end'}"
        if self._drop_truncated and request.finish is not None and request.finish.kind == "length":
            return f"the answer ended by length, after {len(request.token_ids)} tokens"
        return None


class ShardSink:
    """Writes each request whole, when it has ended; one shard is open at a time."""

    def __init__(
        self, folder: OutputFolder, writer: RequestWriter, identity: Mapping[str, Any], shard_rows: int
    ) -> None:
        self._folder, self._requests, self._identity, self._shard_rows = folder, writer, dict(identity), shard_rows
        self._writer: GrowingShardWriter | None = None
        self.shards: list[Shard] = []
        self._finishes: Counter[str] = Counter()

    def add(self, request: GenerationRequest) -> None:
        """Write the rows of a request that has ended."""
        writer = self._open_writer()
        if request.finish is not None:
            self._finishes[request.finish.kind] += 1
        self._requests.store(writer, self._requests.begin(writer, request), request)
        if writer.rows >= self._shard_rows:
            self._seal()

    def finish(self) -> None:
        """Seal what is open and say that the folder is complete."""
        self._seal()
        found = [reject for shard in self.shards for reject in shard.rejects]
        checksum = self._folder.write_rejects(found)
        counts = {"rejected": len(found), "finish_reasons": dict(self._finishes)}
        manifest = Manifest.from_shards(
            self._identity, {}, self.shards, complete=True, counts=counts, rejects_crc32=checksum
        )
        manifest.write(self._folder.manifest_path)

    def discard(self) -> None:
        """Drop what is not sealed."""
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None

    def _open_writer(self) -> GrowingShardWriter:
        if self._writer is None:
            self._writer = self._requests.open(self._folder.shard_path(len(self.shards)))
        return self._writer

    def _seal(self) -> None:
        if self._writer is not None:
            self.shards.append(self._writer.seal())
            self._writer = None


@contextmanager
def shard_sink(
    path: Path, columns: GenerationColumns, identity: Mapping[str, Any], shard_rows: int, device: torch.device
) -> Iterator[ShardSink]:
    """Yield a sink into an empty or new folder; remove what is not sealed when the block ends.

    device: where the model runs.

    Raises:
        UsageError: the folder holds something.
    """
    require_empty(path)
    folder = OutputFolder(path)
    with folder.lock():
        Manifest.from_shards(identity, {}, [], complete=False).write(folder.manifest_path)
        sink = ShardSink(folder, RequestWriter(columns, identity, device), identity, shard_rows)
        try:
            yield sink
        except (DiskFullError, FileAccessError) as error:
            raise type(error)(f"{error.what} {NOT_RESUMED} {_READABLE.format(path)}") from error
        finally:
            sink.discard()


def require_empty(path: Path) -> None:
    """Raise UsageError where there is anything in the folder: a generation from Python does not resume."""
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty; a generation needs an empty or a new folder.")


def _finish_column(request: GenerationRequest) -> torch.Tensor:
    """Return (R,) uint8: why the request ended, in its last row; 0 in the others."""
    column = torch.zeros(request.R, dtype=torch.uint8)
    if request.finish is not None:
        column[-1:] = FINISH_REASONS.index(request.finish.kind)
    return column
