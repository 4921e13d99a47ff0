"""`hiddentap verify`: whether a folder holds what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .json_values import json_value, show_json
from .options import output_options

if TYPE_CHECKING:
    from ..verify import Report


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--model",
    metavar="M",
    help="Folder or hub id to compare with; none: no model.  [default: the one the headers name, if it is here and the same]",
)
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with M run.")
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    metavar="K",
    help="Samples to compare with the model.",
)
@click.option(
    "--repair", is_flag=True, help="Remove shards with errors, for the same capture command to make them again."
)
@output_options
def verify(
    out: Path, model: str | None, trust_remote_code: bool, samples: int, repair: bool, quiet: bool, as_json: bool
) -> int:
    """Check the folder OUT: files, checksums, tokens and values, and K of its samples beside plain forwards of the model.

    Ends with 0 if nothing was found and with 1 if something was.
    """
    from ...models.loading import ModelSource
    from ..verify import verify as verify_folder
    from .progress import shown_progress
    from .quiet_libraries import quiet_libraries

    quiet_libraries()
    given = ModelSource(model, trust_remote_code=trust_remote_code) if model not in (None, "none") else model
    with shown_progress(quiet) as progress:
        report = verify_folder(out, model=given, samples=samples, repair=repair, progress=progress)
    if as_json:
        show_json({**json_value(report), "ok": report.ok})
    elif not quiet:
        _show(report)
    return 0 if report.ok else 1


def _show(report: Report) -> None:
    from .tables import table

    click.echo(table(report.table()))
    for fault in report.faults():
        click.echo(fault)
    click.echo(report.conclusion)
