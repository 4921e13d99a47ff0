"""`hiddentap report`: a folder in pictures, and in words what is unusual about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .json_values import show_json
from .options import output_options

if TYPE_CHECKING:
    from ..report.writing import Report


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="The page to write.  [default: OUT/report.html]",
)  # fmt: skip
@click.option(
    "--png", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write the pictures here too."
)
@click.option(
    "--max-rows", type=click.IntRange(1), default=65_536, show_default=True, metavar="N",
    help="Look at the rows of samples, spread evenly, with about N rows.",
)  # fmt: skip
@output_options
def report(out: Path, html: Path | None, png: Path | None, max_rows: int, quiet: bool, as_json: bool) -> int:
    """Write pictures of the folder OUT as one HTML page, with what is unusual about it in words on top.

    Reads no model. Ends with 0 whatever it finds; `hiddentap verify` is the check.
    """
    from ..report import write_report
    from ..report.verdict import headline
    from .progress import shown_progress

    with shown_progress(quiet) as progress:
        written = write_report(out, html or out / "report.html", png, max_rows=max_rows, progress=progress)
    said = headline(written.notices)
    if as_json:
        show_json({"headline": said, "notices": written.notices, "html": written.html, "pngs": written.pngs})
    elif not quiet:
        _show(written, said, png)
    return 0


def _show(written: Report, said: str, png: Path | None) -> None:
    click.echo(said)
    for notice in written.notices:
        click.echo(f"- {notice.found}\n  {notice.meaning}")
    click.echo(f"page: {written.html}" + (f", {len(written.pngs)} pictures in {png}" if png else ""))
