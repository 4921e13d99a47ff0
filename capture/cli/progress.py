"""Progress as a person sees it: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..run import Progress as RunProgress
from ..run import Silent

_LINE_EVERY_S = 10.0


@contextmanager
def shown_progress(quiet: bool) -> Iterator[RunProgress]:
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
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield BarProgress(bar)


class _Rate:
    """Tokens per second since the first batch."""

    def __init__(self) -> None:
        self.samples = self.tokens = 0
        self._start = time.monotonic()

    def restart(self) -> None:
        self._start = time.monotonic()

    def add(self, samples: int, tokens: int) -> None:
        self.samples, self.tokens = self.samples + samples, self.tokens + tokens

    @property
    def per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self._start, 1e-9)


class BarProgress:
    """A bar: rows while tokenising, then samples with tokens/s and the time left."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._rate = bar, _Rate()
        self._task: TaskID | None = None

    def tokenised(self, rows: int, rejected: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("tokenising", total=None, rate="")
        self._bar.update(self._task, completed=rows, rate=f"{rejected} rejected" if rejected else "")

    def planned(self, samples: int, tokens: int, done_samples: int, done_tokens: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("capturing", total=samples, completed=done_samples, rate="")
        self._rate.restart()

    def captured(self, samples: int, tokens: int) -> None:
        self._rate.add(samples, tokens)
        if self._task is not None:
            self._bar.update(self._task, advance=samples, rate=f"{self._rate.per_second:,.0f} tokens/s")

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class PlainProgress:
    """A line every ten seconds, for logs."""

    def __init__(self) -> None:
        self._rate, self._next = _Rate(), time.monotonic() + _LINE_EVERY_S
        self._total = self._done_before = 0

    def tokenised(self, rows: int, rejected: int) -> None:
        self._line(f"tokenising: {rows} rows, {rejected} rejected")

    def planned(self, samples: int, tokens: int, done_samples: int, done_tokens: int) -> None:
        self._total, self._done_before = samples, done_samples
        self.note(
            f"plan: {samples} samples, {tokens} tokens"
            + (f", {done_samples} samples done before" if done_samples else "")
        )
        self._rate.restart()

    def captured(self, samples: int, tokens: int) -> None:
        self._rate.add(samples, tokens)
        done = self._done_before + self._rate.samples
        self._line(f"capturing: {done} of {self._total} samples, {self._rate.per_second:,.0f} tokens/s")

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    def _line(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            self.note(text)
