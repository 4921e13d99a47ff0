"""Progress as a person sees it, on standard error: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..progress import Work
from .stretch import Stretch

LINE_EVERY_S = 60.0
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


class Display(Protocol):
    """A way to show stretches of work; `every_s` is how often it wants to."""

    every_s: float

    def begin(self, stretch: Stretch) -> None:
        """A stretch begins."""

    def show(self, stretch: Stretch) -> None:
        """How far it is."""

    def note(self, text: str) -> None:
        """A line of text."""

    def close(self) -> None:
        """Nothing more comes."""


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

    def advanced(self, count: int = 0, tokens: int = 0, *, written: int = 0, rejected: int = 0) -> None:
        if self._stretch is not None:
            self._stretch.add(count, tokens, written, rejected)
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
        """The words that there is room for; the bar takes what they leave."""
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
    """A plain line a minute, and one at the end of each stretch."""

    every_s = LINE_EVERY_S

    def begin(self, stretch: Stretch) -> None:
        pass

    def show(self, stretch: Stretch) -> None:
        self.note(f"{stretch.work.what}: {', '.join(stretch.words())}")

    def note(self, text: str) -> None:
        click.echo(text, err=True)

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
