"""`hiddentap verify`: whether a folder holds what it says."""

from __future__ import annotations

from pathlib import Path

import click


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
def verify(out: Path, model: str | None, trust_remote_code: bool, samples: int, repair: bool) -> int:
    """Check the folder OUT: files, checksums, tokens and values, and K of its samples beside plain forwards of the model.

    Ends with 0 if nothing was found and with 1 if something was.
    """
    from ...models.loading import ModelSource
    from ..verify import verify as verify_folder
    from .quiet_libraries import quiet_libraries
    from .tables import table

    quiet_libraries()
    given = ModelSource(model, trust_remote_code=trust_remote_code) if model not in (None, "none") else model
    report = verify_folder(out, model=given, samples=samples, repair=repair)
    click.echo(table(report.table()))
    for fault in report.faults():
        click.echo(fault)
    click.echo(report.conclusion)
    return 0 if report.ok else 1
