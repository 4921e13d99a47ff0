"""`hiddentap verify`: check that a folder holds what it claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import output_options
from .output import json_value, show_json

if TYPE_CHECKING:
    from ..verify import Report


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--model",
    metavar="M",
    help="Model to compare with; none: no model.  [default: the captured one, if it is here and unchanged]",
)
@click.option("--require-model", is_flag=True, help="Fail if no sample could be compared with a model.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    metavar="K",
    help="Number of samples to compare with the model.",
)
@click.option("--repair", is_flag=True, help="Delete corrupt shards; re-run the capture command to regenerate them.")
@output_options
def verify(
    out: Path,
    model: str | None,
    require_model: bool,
    trust_remote_code: bool,
    samples: int,
    repair: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Check the files, checksums, tokens and values of OUT, and recompute K samples with the model.

    If OUT is an export, compare its files with the checksums that were written with them. Exits with 0 if no problem was
    found and with 1 otherwise. --quiet prints problems only.
    """
    from ..formats import is_export
    from ..verify import verify as verify_folder
    from .output import quiet_libraries
    from .progress import shown_progress

    quiet_libraries()
    if is_export(out):
        if model is not None or require_model or repair:
            raise click.UsageError(
                f"{out} is an export, whose files alone are checked; leave out --model and --repair."
            )
        return _verify_export(out, quiet=quiet, as_json=as_json)
    with shown_progress(quiet) as progress:
        report = verify_folder(
            out,
            model=model,
            samples=samples,
            repair=repair,
            require_model=require_model,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if as_json:
        show_json({**json_value(report), "ok": report.ok})
    elif quiet:
        _show_problems(report)
    else:
        _show(report)
    return 0 if report.ok else 1


def _verify_export(path: Path, *, quiet: bool, as_json: bool) -> int:
    from ..formats import check_export
    from ..verify import fault_lines
    from .output import size
    from .progress import shown_progress

    with shown_progress(quiet) as progress:
        found = check_export(path, progress)
    if as_json:
        show_json({**json_value(found), "ok": found.ok})
        return 0 if found.ok else 1
    for fault in fault_lines(path, found.findings):
        click.echo(fault)
    if not quiet:
        told = f"{len(found.findings):,} problems found" if found.findings else "OK: no problems found"
        click.echo(
            f"{told}; {found.files:,} files of an export, {size(found.bytes)}, were compared with their checksums"
        )
    return 0 if found.ok else 1


def _show(report: Report) -> None:
    from .output import table

    click.echo(table(report.table()))
    _show_problems(report)
    click.echo(report.conclusion)


def _show_problems(report: Report) -> None:
    for fault in report.faults():
        click.echo(fault)
