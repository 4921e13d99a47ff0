"""Finished requests on their way into the shards of a folder."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...models.errors import UsageError
from ..identity import device_name, made_with
from ..store import GrowingShardWriter, Manifest, OutputFolder, Reject, Shard
from .generation_request import GenerationRequest
from .request_rows import SAMPLING_MASK, GenerationColumns


class ShardSink:
    """Writes each request whole, when it has ended; one shard is open at a time.

    A request without a row, and one that was aborted, is a reject with its reason.
    """

    def __init__(
        self,
        folder: OutputFolder,
        columns: GenerationColumns,
        identity: Mapping[str, Any],
        shard_rows: int,
        device: torch.device,
    ) -> None:
        self._folder, self._columns, self._identity, self._shard_rows = folder, columns, dict(identity), shard_rows
        self._metadata = {**identity, "made_with": made_with({"device": device_name(device)}, "off")}
        self._writer: GrowingShardWriter | None = None
        self.shards: list[Shard] = []
        self._finishes: Counter[str] = Counter()

    def add(self, request: GenerationRequest) -> int:
        """Write the rows of a request that has ended; returns their bytes, 0 where it was rejected."""
        writer = self._open_writer()
        sample = writer.begin(request.index, request.rid, request.prompt.source, request.prompt.line)
        if request.finish is not None:
            self._finishes[request.finish.kind] += 1
        reason = _reject_reason(request)
        if reason is not None:
            writer.reject(sample, reason, {"code": request.finish.kind if request.finish else "unfinished"})
            return 0
        rows = self._columns.dense(request)
        masks = self._columns.sampling_mask(request)
        if masks is not None:
            rows |= {f"{SAMPLING_MASK}_lengths": masks.lengths, f"{SAMPLING_MASK}_ids": masks.values}
        writer.append(sample, rows)
        if writer.rows >= self._shard_rows:
            self._seal()
        return sum(column.nbytes for column in rows.values())

    def finish(self, rejects: Sequence[Reject] = ()) -> dict[str, Any]:
        """Seal what is open and say that the folder is complete; returns the manifest's counts.

        rejects: input rows that never became requests.
        """
        self._seal()
        found = [*rejects, *(reject for shard in self.shards for reject in shard.rejects)]
        self._folder.write_rejects(found)
        counts = {"rejected": len(found), "finish_reasons": dict(self._finishes)}
        manifest = Manifest.from_shards(self._identity, {}, self.shards, complete=True, counts=counts)
        manifest.write(self._folder.manifest_path)
        return manifest.counts

    def discard(self) -> None:
        """Drop what is not sealed."""
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None

    def _open_writer(self) -> GrowingShardWriter:
        if self._writer is None:
            path = self._folder.shard_path(len(self.shards))
            self._writer = GrowingShardWriter(path, self._columns.columns, self._metadata)
        return self._writer

    def _seal(self) -> None:
        if self._writer is not None:
            self.shards.append(self._writer.seal())
            self._writer = None


@contextmanager
def shard_sink(
    path: Path, columns: GenerationColumns, identity: Mapping[str, Any], shard_rows: int, device: torch.device
) -> Iterator[ShardSink]:
    """A sink into an empty or new folder; what is not sealed when the block ends goes.

    device: where the model runs.

    Raises:
        UsageError: the folder holds something.
    """
    require_empty(path)
    folder = OutputFolder(path)
    with folder.lock():
        Manifest.from_shards(identity, {}, [], complete=False).write(folder.manifest_path)
        sink = ShardSink(folder, columns, identity, shard_rows, device)
        try:
            yield sink
        finally:
            sink.discard()


def require_empty(path: Path) -> None:
    """Raise UsageError where there is anything in the folder: a generation is not taken up again."""
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty; a generation needs an empty or a new folder.")


def _reject_reason(request: GenerationRequest) -> str | None:
    if request.aborted:
        return "the request was aborted"
    if not request.token_ids:
        return f"no token was committed: {request.finish.detail if request.finish else 'it did not end'}"
    return None
