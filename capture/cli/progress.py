"""Progress as a person sees it, on standard error: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..progress import Done, Work
from .output import size

LINE_EVERY_S = 60.0
LINE_TIME = "%Y-%m-%d %H:%M:%S"
_DRAW_EVERY_S = 0.1
_BAR_WIDTH, _LEAST_BAR = 24, 4
_SEPARATOR = " · "


@contextmanager
def shown_progress(quiet: bool, check: Callable[[], None] | None = None) -> Iterator[ShownProgress]:
    """Progress of one command.

    quiet: shows nothing. check: called whenever something was done; what it raises ends the work.
    """
    shown = ShownProgress(_display(quiet), check)
    try:
        yield shown
    finally:
        shown.close()


@dataclass
class Stretch:
    """Counts of one stretch, and what they mean in words.

    count, tokens: done, those of an earlier run among them, which say nothing about speed. written: bytes.
    """

    work: Work
    written: int = 0
    rejected: int = 0
    count: int = field(init=False)
    tokens: int = field(init=False)
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.tokens, self._start = self.work.done, self.work.done_tokens, time.monotonic()

    def add(self, done: Done) -> None:
        self.count += done.count
        self.tokens += done.tokens
        self.written += done.written
        self.rejected += done.rejected

    @property
    def fraction(self) -> float | None:
        """What is done of it, by tokens where their number is known: samples of one length come together."""
        return self._share(self.count, self.tokens)

    @property
    def seconds_left(self) -> float | None:
        now, before = self.fraction, self._share(self.work.done, self.work.done_tokens)
        if now is None or before is None or now <= before:
            return None
        return self._seconds * max(1 - now, 0) / (now - before)

    def words(self, *, short: bool = False) -> list[str]:
        """Return progress, time left, speed, rejects and bytes written; empty parts are left out.

        short: as little text as tells it, for a place beside a bar.
        """
        left, tokens = self.seconds_left, self.tokens - self.work.done_tokens
        of, written = ("/", "") if short else (" of ", " written")
        total = "" if self.work.total is None else f"{of}{self.work.total:,}"
        said = [f"{self.count:,}{total} {self.work.unit}"]
        said += [f"{self.rejected:,} rejected"] if self.rejected else []
        said += [f"{duration(left)} left"] if left is not None and self.count != self.work.total else []
        said += [f"{tokens / self._seconds:,.0f} tokens/s"] if tokens else []
        said += [f"{size(self.written)}{written}"] if self.written else []
        return said

    def _share(self, count: int, tokens: int) -> float | None:
        if self.work.tokens:
            return tokens / self.work.tokens
        return count / self.work.total if self.work.total else None

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)


class Display(Protocol):
    """A way to show stretches of work; `every_s` is how often it wants to."""

    every_s: float

    def begin(self, stretch: Stretch) -> None:
        """Begin a stretch of work."""

    def show(self, stretch: Stretch) -> None:
        """Show the progress so far."""

    def note(self, text: str) -> None:
        """Print one line of text."""

    def close(self) -> None:
        """End the output; nothing follows."""


class ShownProgress:
    """Counts what it is told; shows the stretch under way now and then, and once more at its end."""

    def __init__(self, display: Display, check: Callable[[], None] | None = None) -> None:
        self._display, self._check = display, check
        self._stretch: Stretch | None = None
        self._next = 0.0

    def started(self, work: Work) -> None:
        self._end()
        self._stretch = Stretch(work)
        self._next = time.monotonic() + self._display.every_s
        self._display.begin(self._stretch)

    def advanced(self, done: Done) -> None:
        if self._stretch is not None:
            self._stretch.add(done)
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + self._display.every_s
                self._display.show(self._stretch)
        if self._check is not None:
            self._check()

    def note(self, text: str) -> None:
        self._display.note(text)

    def close(self) -> None:
        self._end()
        self._display.close()

    def _end(self) -> None:
        if self._stretch is not None:
            self._display.show(self._stretch)
            self._stretch = None


class Bar:
    """A bar for the stretch under way, and beside it what there is to say, as far as the terminal has room."""

    every_s = _DRAW_EVERY_S

    def __init__(self, console: Console) -> None:
        self._width = console.width
        self._column = BarColumn(_BAR_WIDTH)
        self._bar = Progress(
            TextColumn("{task.description}"), self._column, TextColumn("{task.fields[said]}"), console=console
        )
        self._task: TaskID | None = None
        self._bar.start()

    def begin(self, stretch: Stretch) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        total = None if stretch.fraction is None else 1.0
        self._task = self._bar.add_task(stretch.work.what, total=total, said=self._fitted(stretch))

    def show(self, stretch: Stretch) -> None:
        if self._task is not None:
            said = self._fitted(stretch)
            self._bar.update(self._task, completed=stretch.fraction or 0.0, said=said)

    def _fitted(self, stretch: Stretch) -> str:
        """Return the words that fit; the bar takes the rest of the line."""
        words, room = stretch.words(short=True), self._width - len(stretch.work.what) - 2
        while len(words) > 1 and len(_SEPARATOR.join(words)) > room - _LEAST_BAR:
            words.pop()
        said = _SEPARATOR.join(words)
        self._column.bar_width = max(_LEAST_BAR, min(_BAR_WIDTH, room - len(said)))
        return said

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Lines:
    """A plain line a minute, and one at the end of each stretch, each with the local date and time."""

    every_s = LINE_EVERY_S

    def begin(self, stretch: Stretch) -> None:
        pass

    def show(self, stretch: Stretch) -> None:
        self.note(f"{stretch.work.what}: {', '.join(stretch.words())}")

    def note(self, text: str) -> None:
        click.echo(f"{time.strftime(LINE_TIME)} {text}", err=True)

    def close(self) -> None:
        pass


class Nothing:
    """Shows nothing."""

    every_s = LINE_EVERY_S

    def begin(self, stretch: Stretch) -> None:
        pass

    def show(self, stretch: Stretch) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def _display(quiet: bool) -> Display:
    if quiet:
        return Nothing()
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines()


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``40 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
