"""`hiddentap export`: a capture as another trainer's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .groups import OptionGroup, grouped, option
from .options import REPORTING
from .output import show_json

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


OUTPUT = OptionGroup(
    "Output",
    (
        option("--to", type=click.Choice(LAYOUTS), required=True, help="Layout to write."),
        option("--dest", type=click.Path(), required=True, metavar="DIR", help="Folder to fill."),
        option("--algorithm", type=click.Choice(ALGORITHMS), help="Algorithm to write for (specforge, angelslim)."),
        option(
            "--seq-length", type=click.IntRange(1), metavar="T",
            help="Pad or truncate samples to this length (automodel-*).  [default: the longest]",
        ),
        option("--shard-size", type=click.IntRange(1), metavar="N", help="Samples per shard (deepspec, automodel-*)."),
        option("--compress", is_flag=True, help="Gzip each file (specforge)."),
    ),
)  # fmt: skip
MODEL = OptionGroup(
    "Model",
    (
        option(
            "--head", type=click.Path(), metavar="DIR",
            help="Folder with the model's final norm, lm_head and embeddings.  [default: OUT/head]",
        ),
        option("--trust-remote-code", is_flag=True, help="Run code that comes with the model, to build its norm."),
        option("--target-model", metavar="M", help="Model name to write into the exported files.  [default: as captured]"),
        option(
            "--target-vocab-size", type=click.IntRange(1), metavar="V", help="Vocabulary size; needed if there is no head."
        ),
        option(
            "--draft-vocab-size", type=click.IntRange(1), metavar="D",
            help="Vocabulary size of the draft model.  [default: all]",
        ),
        option(
            "--draft-vocab", type=click.Path(), metavar="FILE",
            help="Keep the vocabulary of an existing draft model: file with its d2t and t2d.",
        ),
    ),
)  # fmt: skip
LAYERS = OptionGroup(
    "Layers",
    (
        option(
            "--norm", type=click.Choice(["pre", "post"]),
            help="Last hidden states before (pre) or after (post) the final norm (modelopt).  [default: post]",
        ),
        option(
            "--target-probs-topk", type=click.IntRange(1), metavar="K",
            help="Keep the teacher's K most likely tokens (automodel-eagle3).  [default: all]",
        ),
    ),
)  # fmt: skip
INPUT = OptionGroup(
    "Input",
    (
        option(
            "--min-supervised", type=click.IntRange(0), default=1, show_default=True, metavar="N",
            help="Skip samples with fewer supervised tokens.",
        ),
    ),
)  # fmt: skip


@grouped(MODEL, LAYERS, INPUT, OUTPUT, REPORTING)
@click.argument("source", type=click.Path(path_type=Path), metavar="OUT")
def export(quiet: bool, as_json: bool, **given: Any) -> int:
    """Write the capture OUT as another trainer's files.

    Run the same command again to resume an export that was stopped.
    """
    from ..formats import ExportSettings, export_dataset
    from .output import quiet_libraries
    from .progress import shown_progress

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
    from .output import table

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
