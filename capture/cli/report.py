"""`hiddentap report`: a folder in pictures, and in words what is unusual about it."""

from __future__ import annotations

from pathlib import Path

import click


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
def report(out: Path, html: Path | None, png: Path | None, max_rows: int) -> int:
    """Write pictures of the folder OUT as one HTML page, with what is unusual about it in words on top.

    Reads no model. Ends with 0 whatever it finds; `hiddentap verify` is the check.
    """
    from ..report import write_report
    from ..report.verdict import headline

    written = write_report(out, html or out / "report.html", png, max_rows=max_rows)
    click.echo(headline(written.notices))
    for notice in written.notices:
        click.echo(f"- {notice.found}\n  {notice.meaning}")
    click.echo(f"page: {written.html}" + (f", {len(written.pngs)} pictures in {png}" if png else ""))
    return 0
