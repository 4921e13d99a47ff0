"""Progress of a generation: a bar on a terminal, a line now and then elsewhere; and its end on a signal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...models.errors import RunError
from ..run import RunStopped, Stopping

_LINE_EVERY_S = 10.0


class _Shown(Protocol):
    """Shows how many requests have ended, of how many, and the tokens so far."""

    def __call__(self, ended: int, requests: int, tokens: int, seconds: float) -> None: ...


class GenerationStopped(RunError):  # noqa: N818 - an ending that was asked for
    """The generation was asked to end."""

    def __init__(self, out: Path, exit_code: int) -> None:
        super().__init__(
            f"stopped; sealed shards stay in {out} (CapturedDataset reads them with allow_incomplete=True). "
            "A generation is not taken up again: start over with an empty folder."
        )
        self.exit_code = exit_code


class CountedProgress:
    """Counts what a generation tells, shows it, and ends it when that was asked for."""

    def __init__(self, show: _Shown, stopping: Stopping, out: Path) -> None:
        self._show, self._stopping, self._out = show, stopping, out
        self._requests = self._ended = self._tokens = 0
        self._start = time.monotonic()

    def started(self, requests: int) -> None:
        self._requests, self._start = requests, time.monotonic()
        self._tell()

    def stepped(self, tokens: int) -> None:
        self._tokens += tokens
        self._tell()
        try:
            self._stopping.check()
        except RunStopped as stopped:
            raise GenerationStopped(self._out, stopped.exit_code) from stopped

    def ended(self) -> None:
        self._ended += 1
        self._tell()

    def _tell(self) -> None:
        self._show(self._ended, self._requests, self._tokens, max(time.monotonic() - self._start, 1e-9))


@contextmanager
def shown_generation(quiet: bool, stopping: Stopping, out: Path) -> Iterator[CountedProgress]:
    """Progress on standard error: nothing, a bar, or plain lines."""
    console = Console(stderr=True)
    if quiet:
        yield CountedProgress(lambda *_: None, stopping, out)
    elif console.is_terminal:
        with Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        ) as bar:
            yield CountedProgress(_Bar(bar), stopping, out)
    else:
        yield CountedProgress(_Lines(), stopping, out)


class _Bar:
    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("generating", total=None, rate="")

    def __call__(self, ended: int, requests: int, tokens: int, seconds: float) -> None:
        self._bar.update(self._task, completed=ended, total=requests, rate=f"{tokens / seconds:,.1f} tokens/s")


class _Lines:
    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, ended: int, requests: int, tokens: int, seconds: float) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_EVERY_S
        click.echo(
            f"generating: {ended} of {requests} requests, {tokens} tokens, {tokens / seconds:,.1f} tokens/s", err=True
        )
