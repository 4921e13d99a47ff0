"""`hiddentap import`: another trainer's files as a capture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .export import LAYOUTS
from .options import layer_ids, output_options
from .output import show_json

if TYPE_CHECKING:
    from ..formats import ImportSummary


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--from", "layout", type=click.Choice(LAYOUTS), required=True, help="Layout of the files in DIR.")
@click.option("--out", type=click.Path(), required=True, metavar="OUT", help="Folder to fill.")
@click.option("--model", metavar="M", help="Folder or hub id of the model that made the rows; only its config is read.")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--n", type=click.IntRange(1), metavar="N", help="Number of decoder layers, without --model.")
@click.option(
    "--layer-ids", "ids", metavar="I,J,...", help="Layer ids of the states in DIR.  [default: as recorded in DIR]"
)
@click.option(
    "--convention",
    type=click.Choice(["layer_output", "boundary"]),
    help="Convention of those ids.  [default: boundary for speculators, layer_output for all others]",
)
@click.option(
    "--final",
    type=click.Choice(["pre", "post"]),
    help="Last hidden states before (pre) or after (post) the final norm.  [default: as recorded in DIR]",
)
@click.option(
    "--first-token", type=click.IntRange(0), metavar="ID", help="First token of every sample (automodel-eagle3)."
)
@click.option("--pad-id", type=click.IntRange(0), metavar="ID", help="Token id that pads samples (automodel-dspark).")
@click.option(
    "--shard-rows", type=click.IntRange(1), default=262_144, show_default=True, help="Maximum rows per shard."
)
@output_options
def import_(quiet: bool, as_json: bool, ids: str | None, **given: Any) -> int:
    """Convert another trainer's files in DIR to shards in OUT; check them with `hiddentap verify`.

    Run the same command again to resume an import that was stopped.
    """
    from ..formats import ImportSettings, import_dataset
    from .output import quiet_libraries
    from .progress import shown_progress

    quiet_libraries()
    settings = ImportSettings(layer_ids=layer_ids(ids), **given)  # type: ignore[arg-type]  # named by the check of layer ids
    with shown_progress(quiet) as progress:
        summary = import_dataset(settings, progress)
    if as_json:
        show_json(summary)
    elif not quiet:
        _show(summary)
    return 0


def _show(summary: ImportSummary) -> None:
    from .output import table

    boundaries = ", ".join(map(str, summary.boundaries)) or "none"
    rows = [
        ("samples", f"{summary.captured:,}, {summary.tokens:,} tokens"),
        ("claimed", f"boundaries {boundaries}, H = {summary.hidden_size}, last states: {summary.final}"),
        ("shards", f"{summary.shards:,} in {summary.out}"),
    ]
    if summary.shards_done_before:
        rows.append(("done before", f"{summary.shards_done_before:,} shards"))
    if summary.rejected:
        rows.append(("rejected", f"{summary.rejected:,} samples; see {summary.out / 'rejects.jsonl'}"))
    click.echo(table(rows))
