"""`hiddentap export`: a capture, as another trainer's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .json_values import show_json
from .options import output_options

if TYPE_CHECKING:
    from ..formats import ExportSummary

LAYOUTS = (
    "specforge",
    "speculators",
    "deepspec",
    "modelopt",
    "automodel-dspark",
    "automodel-eagle3",
    "angelslim",
    "eagle1",
)
ALGORITHMS = ("eagle3", "dflash", "domino", "dspark")


@click.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--to", type=click.Choice(LAYOUTS), required=True, help="Whose files to write.")
@click.option("--dest", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder to fill.")
@click.option(
    "--algorithm", type=click.Choice(ALGORITHMS), help="For layouts that differ by it (specforge, angelslim)."
)
@click.option(
    "--head",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder with the model's final norm, lm_head and embeddings.  [default: OUT/head]",
)
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run, to build its norm.")
@click.option(
    "--norm", type=click.Choice(["pre", "post"]), help="Which last hidden states (modelopt).  [default: post]"
)
@click.option("--target-model", metavar="M", help="How the trainer names the model.  [default: as captured]")
@click.option(
    "--target-vocab-size", type=click.IntRange(1), metavar="V", help="Needed where there is no head to say it."
)
@click.option("--draft-vocab-size", type=click.IntRange(1), metavar="D", help="Tokens of the drafter.  [default: all]")
@click.option(
    "--target-probs-topk",
    type=click.IntRange(1),
    metavar="K",
    help="Keep the teacher's K most likely tokens (automodel-eagle3).  [default: all]",
)
@click.option(
    "--seq-length",
    type=click.IntRange(1),
    metavar="T",
    help="Length that samples are padded and cut to (automodel-*).  [default: the longest]",
)
@click.option("--shard-size", type=click.IntRange(1), metavar="N", help="Samples of a shard (deepspec, automodel-*).")
@click.option(
    "--min-supervised",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    help="Leave out samples with fewer supervised tokens.",
)
@click.option("--compress", is_flag=True, help="Gzip each file (specforge).")
@output_options
def export(quiet: bool, as_json: bool, **given: Any) -> int:
    """Write the capture OUT as another trainer's files. The same command goes on where an earlier one stopped."""
    from ..formats import ExportSettings, export_dataset
    from .progress import shown_progress
    from .quiet_libraries import quiet_libraries

    quiet_libraries()
    settings = ExportSettings(**given)
    with shown_progress(quiet) as progress:
        summary = export_dataset(settings, progress)
    if as_json:
        show_json(summary)
    elif not quiet:
        _show(summary)
    return 0


def _show(summary: ExportSummary) -> None:
    from .tables import table

    rows = [
        ("samples", f"{summary.samples:,}, {summary.tokens:,} tokens"),
        ("files", f"{summary.files:,} with rows in {summary.dest}"),
    ]
    if summary.files_done_before:
        rows.append(("done before", f"{summary.files_done_before:,} files"))
    if summary.truncated:
        rows.append(("truncated", f"{summary.truncated:,} samples"))
    rows += [("left out", f"{count:,} with {reason}") for reason, count in summary.left_out.items()]
    click.echo(table(rows))
