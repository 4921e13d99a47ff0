"""Sources to samples and rejects."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from ...models.errors import HiddentapError, RunError, UsageError
from .encoder import RecordEncoder
from .options import TokeniseOptions
from .records.items import Item, RawRecord
from .records.sources import read_records


def tokenise(
    sources: Sequence[str], encoder: RecordEncoder, *, workers: int = 0, limit: int | None = None
) -> Iterator[Item]:
    """Yield one item per input row of the sources, in order; at most `limit` rows are read.

    With `workers` > 0 rows are tokenized in that many processes, each with one thread and an encoder of the same options; the
    items are the same.
    Raises UsageError or SourceError at once for sources that cannot be there, and while iterating for a tokenizer that
    cannot be loaded or a source that turns out damaged.
    """
    if workers < 0 or (limit is not None and limit < 0):
        raise UsageError(f"expected workers and limit to be at least 0; found workers={workers}, limit={limit}")
    rows = islice(read_records(sources), limit)
    return tokenise_in_workers(rows, encoder.options, workers) if workers else map(encoder.item, rows)


_CHUNK_ROWS = 64
_CHUNK_BYTES = 1 << 20


def tokenise_in_workers(rows: Iterator[RawRecord], options: TokeniseOptions, workers: int) -> Iterator[Item]:
    """Yield the item of every row, in the order of the rows.

    Each worker holds one chunk at a time, so at most `workers` chunks are in flight; a worker for whom there is no chunk is
    not started. A worker's error ends the iteration with that error, a worker's death with a RunError; leaving the
    iteration ends the workers.
    """
    chunks = _chunks(rows)
    first = list(islice(chunks, workers))
    with _Workers(options, len(first)) as pool:
        for worker, chunk in zip(pool.all, first, strict=True):
            worker.send(chunk)
        busy = deque(pool.all)
        while busy:
            worker = busy.popleft()
            items = worker.receive()
            if _hand_over(worker, chunks):
                busy.append(worker)
            yield from items


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: "Connection[Any, Any]"

    def send(self, chunk: list[RawRecord]) -> None:
        try:
            self.connection.send(chunk)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> list[Item]:
        # A worker that dies closes its pipe, whatever ended it.
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, Exception):
            raise answer
        items: list[Item] = answer
        return items

    def _death(self) -> RunError:
        self.process.join(timeout=1)
        return RunError(
            f"expected the tokenizing workers to live to the end; one ended with exit code {self.process.exitcode} "
            f"(negative: killed by that signal, often for want of memory); run again with fewer workers"
        )


class _Workers:
    """Worker processes; they end with the `with` block, and by themselves when this process dies (their pipe closes)."""

    def __init__(self, options: TokeniseOptions, count: int) -> None:
        self._options = options
        self._count = count
        self.all: list[_Worker] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self.all.append(self._start())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.process.join()
            worker.connection.close()

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._options), daemon=True)
        try:
            process.start()
        finally:
            # Held open here, it would hide the worker's death.
            theirs.close()
        return _Worker(process, ours)


def _hand_over(worker: _Worker, chunks: Iterator[list[RawRecord]]) -> bool:
    chunk = next(chunks, None)
    if chunk is None:
        return False
    worker.send(chunk)
    return True


def _chunks(rows: Iterator[RawRecord]) -> Iterator[list[RawRecord]]:
    chunk: list[RawRecord] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.payload)
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _work(connection: "Connection[Any, Any]", options: TokeniseOptions) -> None:
    """Encode chunks in a worker process until the pipe closes."""
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    encoder: RecordEncoder | None = None
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        try:
            encoder = encoder or RecordEncoder(options)
            answer: Any = [encoder.item(row) for row in chunk]
        except HiddentapError as error:
            answer = error
        except Exception:  # noqa: BLE001 - whatever it is must reach the parent before this process ends
            answer = RunError(f"a tokenizing worker failed:\n{traceback.format_exc()}")
        connection.send(answer)
