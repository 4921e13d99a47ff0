"""`hiddentap report`: one HTML page of figures of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import output_options
from .output import show_json

if TYPE_CHECKING:
    from ..report.writing import Report


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Page to write.  [default: OUT/report.html]",
)  # fmt: skip
@click.option(
    "--png", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Also write the figures to DIR."
)
@click.option(
    "--max-rows", type=click.IntRange(1), default=65_536, show_default=True, metavar="N",
    help="Compute the figures from about N rows, of samples spread evenly over OUT.",
)  # fmt: skip
@output_options
def report(out: Path, html: Path | None, png: Path | None, max_rows: int, quiet: bool, as_json: bool) -> int:
    """Write one HTML page of figures of the folder OUT, anomalies first.

    Reads no model. Exits with 0 whatever it finds; use `hiddentap verify` to check a folder.
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
    click.echo(f"page: {written.html}" + (f", {len(written.pngs)} figures in {png}" if png else ""))
