"""A captured sample on a terminal or in a pipe: its text, and each token with its mask and the norms of its states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .printable import printable

_BARS = "▁▂▃▄▅▆▇█"
_SUPERVISED, _ODD = "green", "bold red"
_TOKEN_COLUMNS_WIDTH, _STATE_WIDTH = 56, 13


def show_marked(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print (text, supervised) pieces as one text; what is supervised is green and in double brackets."""
    for text, supervised in pieces:
        shown = printable(text)
        click.echo(click.style(f"[[{shown}]]", fg="green") if supervised else shown, nl=False)
    click.echo()


@dataclass(frozen=True)
class SampleRows:
    """A sample, row by row.

    title: one line about it. pieces: (text, supervised) of its whole text.
    tokens: text of each token. ids: the token ids. supervised: the loss mask.
    states: names of the stored states. norms: per row, one norm per state.
    """

    title: str
    pieces: Sequence[tuple[str, bool]]
    tokens: Sequence[str]
    ids: Sequence[int]
    supervised: Sequence[bool]
    states: Sequence[str]
    norms: Sequence[Sequence[float]]


def show_rows(sample: SampleRows) -> None:
    """Print it: the text, then a line per token; in color where a terminal reads it."""
    console = Console()
    click.echo(f"{click.style(printable(sample.title), bold=True)}; what is [[marked]] is supervised\n")
    show_marked(sample.pieces)
    click.echo("\nRow by row, with the norm of each stored state:")
    if console.is_terminal:
        # A table wider than the terminal wraps; squeezed into it, its numbers would be cut.
        wide = max(console.width, _TOKEN_COLUMNS_WIDTH + _STATE_WIDTH * len(sample.states))
        Console(width=wide).print(colored_table(sample))
        return
    for line in plain_table(sample):
        click.echo(line)


def plain_table(sample: SampleRows) -> Iterator[str]:
    """Return the rows as lines of aligned columns."""
    rows = [("row", "id", "mask", *sample.states, "token")]
    rows += [
        (str(row), str(sample.ids[row]), "1" if sample.supervised[row] else "0", *map(_number, norms), repr(token))
        for row, (token, norms) in enumerate(zip(sample.tokens, sample.norms, strict=True))
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        yield "  ".join([*cells, row[-1]])


def colored_table(sample: SampleRows) -> Table:
    """Return the rows as a table with green supervised tokens and a log-scale bar beside each norm.

    The first row, where many models keep very large values, does not stretch the scale.
    """
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in ("row", "id"):
        table.add_column(name, justify="right", style="dim")
    table.add_column("mask", justify="center")
    table.add_column("token", overflow="fold", max_width=28)
    for name in sample.states:
        table.add_column(name, justify="right", no_wrap=True)
    ranges = [_log_range(column[1:]) for column in zip(*sample.norms, strict=True)]
    for row, (token, norms) in enumerate(zip(sample.tokens, sample.norms, strict=True)):
        marked = sample.supervised[row]
        mark, shown = "●" if marked else "", Text(repr(token)[1:-1], style=_SUPERVISED if marked else "")
        cells = [_cell(norm, span) for norm, span in zip(norms, ranges, strict=True)]
        table.add_row(str(row), str(sample.ids[row]), Text(mark, style=_SUPERVISED), shown, *cells)
    return table


def _cell(norm: float, span: tuple[float, float]) -> Text:
    if not math.isfinite(norm) or norm == 0:
        return Text(_number(norm), style=_ODD)
    low, high = span
    place = min(max((math.log(norm) - low) / (high - low), 0), 1) if high > low else 0.0
    return Text.assemble(_number(norm), " ", (_BARS[round(place * (len(_BARS) - 1))], "cyan"))


def _log_range(norms: Sequence[float]) -> tuple[float, float]:
    logs = [math.log(norm) for norm in norms if math.isfinite(norm) and norm > 0]
    return (min(logs), max(logs)) if logs else (0.0, 0.0)


def _number(norm: float) -> str:
    return f"{norm:,.0f}" if abs(norm) >= 1000 else f"{norm:.3g}"
