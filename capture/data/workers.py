"""Tokenisation in worker processes, in input order."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from ...models.errors import HiddentapError, RunError
from .items import Item
from .options import TokeniseOptions
from .raw_row import RawRow
from .tokeniser import Tokeniser

_CHUNK_ROWS = 64
_CHUNK_BYTES = 1 << 20


def tokenise_in_workers(rows: Iterator[RawRow], options: TokeniseOptions, workers: int) -> Iterator[Item]:
    """The item of every row, in the order of the rows.

    Each worker holds one chunk at a time, so at most `workers` chunks are in flight. A worker's error ends the
    iteration with that error, a worker's death with a RunError; leaving the iteration ends the workers.
    """
    chunks = _chunks(rows)
    with _Workers(options, workers) as pool:
        busy = deque(worker for worker in pool.all if _hand_over(worker, chunks))
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

    def send(self, chunk: list[RawRow]) -> None:
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
            f"expected the tokenising workers to live to the end; one ended with exit code {self.process.exitcode} "
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


def _hand_over(worker: _Worker, chunks: Iterator[list[RawRow]]) -> bool:
    chunk = next(chunks, None)
    if chunk is None:
        return False
    worker.send(chunk)
    return True


def _chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
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
    """A worker's life: chunks in, items out, until the pipe closes."""
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    tokeniser: Tokeniser | None = None
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        try:
            tokeniser = tokeniser or Tokeniser(options)
            answer: Any = [tokeniser.item(row) for row in chunk]
        except HiddentapError as error:
            answer = error
        except Exception:  # noqa: BLE001 - whatever it is must reach the parent before this process ends
            answer = RunError(f"a tokenising worker failed:\n{traceback.format_exc()}")
        connection.send(answer)
