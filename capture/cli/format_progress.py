"""Progress of exports and imports: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..formats import Progress as FormatProgress
from ..formats import Silent

_LINE_EVERY_S = 10.0


@contextmanager
def shown_progress(quiet: bool) -> Iterator[FormatProgress]:
    """Progress on standard error: nothing, a bar, or plain lines."""
    if quiet:
        yield Silent()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainProgress()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield BarProgress(bar)


class BarProgress:
    """A bar of samples for each stretch of work, with the tokens so far and the time left."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, TaskID(-1)
        self._tokens = 0

    def started(self, what: str, samples: int) -> None:
        if self._bar.tasks:
            self._bar.remove_task(self._task)
        self._tokens = 0
        self._task = self._bar.add_task(what, total=samples, tokens="0")

    def advanced(self, samples: int, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(self._task, advance=samples, tokens=f"{self._tokens:,}")

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class PlainProgress:
    """A line every ten seconds, for logs."""

    def __init__(self) -> None:
        self._what, self._total, self._done = "", 0, 0
        self._next = time.monotonic() + _LINE_EVERY_S

    def started(self, what: str, samples: int) -> None:
        self._what, self._total, self._done = what, samples, 0

    def advanced(self, samples: int, tokens: int) -> None:  # noqa: ARG002
        self._done += samples
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            self.note(f"{self._what}: {self._done} of {self._total} samples")

    def note(self, text: str) -> None:
        click.echo(text, err=True)
