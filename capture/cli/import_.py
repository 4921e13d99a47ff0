"""`hiddentap import`: another trainer's files, as a capture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .export import LAYOUTS
from .json_values import show_json
from .options import layer_ids, output_options

if TYPE_CHECKING:
    from ..formats import ImportSummary


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--from", "layout", type=click.Choice(LAYOUTS), required=True, help="Whose files DIR holds.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="OUT", help="Folder to fill.")
@click.option("--model", metavar="M", help="Folder or hub id of the model that the rows come from; reads its config.")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run.")
@click.option(
    "--n", type=click.IntRange(1), metavar="N", help="The model's decoder layers, where --model is not given."
)
@click.option(
    "--layer-ids", "ids", metavar="I,J,...", help="The layers, as DIR's maker was told.  [default: as DIR says]"
)
@click.option(
    "--convention",
    type=click.Choice(["layer_output", "boundary"]),
    help="What those ids mean.  [default: boundary for speculators, layer_output for all others]",
)
@click.option(
    "--final", type=click.Choice(["pre", "post"]), help="What DIR's last hidden states are.  [default: as DIR says]"
)
@click.option(
    "--first-token", type=click.IntRange(0), metavar="ID", help="The first token of every sample (automodel-eagle3)."
)
@click.option(
    "--pad-id", type=click.IntRange(0), metavar="ID", help="The id that samples are padded with (automodel-dspark)."
)
@click.option(
    "--shard-rows", type=click.IntRange(1), default=262_144, show_default=True, help="Rows at which a shard is full."
)
@output_options
def import_(quiet: bool, as_json: bool, ids: str | None, **given: Any) -> int:
    """Read another trainer's files in DIR into shards in OUT, for `hiddentap verify` to check and `export` to write again.

    The same command goes on where an earlier one stopped.
    """
    from ..formats import ImportSettings, import_dataset
    from .progress import shown_progress
    from .quiet_libraries import quiet_libraries

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
    from .tables import table

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
