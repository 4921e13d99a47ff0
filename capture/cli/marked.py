"""A sample's text with its loss mask, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

import click


def show_marked(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print (text, supervised) pieces as one text; what is supervised is green and in double brackets."""
    for text, supervised in pieces:
        click.echo(click.style(f"[[{text}]]", fg="green") if supervised else text, nl=False)
    click.echo()
