"""`hiddentap capture`: conversations in, shards of hidden states out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .json_values import json_value, show_json
from .options import (
    compute_options,
    key_values,
    layer_ids,
    model_options,
    model_source,
    output_options,
    tap_options,
    text_options,
    text_settings,
)

if TYPE_CHECKING:
    from ..run import RunSummary
    from ..run.estimate import RunEstimate


@click.command()
@model_options
@compute_options
@tap_options
@text_options
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="OUT", help="Folder to fill.")
@click.option(
    "--ids-of", metavar="SYSTEM", help="Whose ids they are: vllm, specforge, deepspec, ... (see `hiddentap layers M`)."
)
@click.option(
    "--draft-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take the ids from a drafter's config.json; needs --ids-of.",
)
@click.option(
    "--algorithm", type=click.Choice(["eagle3", "dflash", "dspark"]), help="Take the default layers of this algorithm."
)
@click.option(
    "--adapter", metavar="NAME", help="How to read the residual stream where it is not plain; errors say which fit."
)
@click.option(
    "--top-logits",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    help="Store the K largest logits of each row, their ids and the log-sum-exp.",
)
@click.option(
    "--store-dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="How rows are stored.  [default: as computed]",
)
@click.option(
    "--tp",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Under torchrun: N processes hold one copy of the model together.  [default: 1]",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Positions of one forward.  [default: tried out at the start]",
)
@click.option("--exact", is_flag=True, help="One sample a forward: rows equal those of a plain forward bit for bit.")
@click.option(
    "--compile",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Compile decoder layers; auto: where that saves more time than it costs.",
)
@click.option(
    "--shard-rows", type=click.IntRange(1), default=262_144, show_default=True, help="Most rows of one shard."
)
@click.option(
    "--on-bad-values",
    type=click.Choice(["reject", "raise", "keep"]),
    default="reject",
    show_default=True,
    help="What becomes of samples with rows that are not finite or all zero.",
)
@click.option(
    "--engine",
    type=click.Choice(["hf", "ray", "vllm"]),
    default="hf",
    show_default=True,
    help="What runs the forwards; hf: the Hugging Face model in this process, ray: such models in workers of a Ray cluster "
    "(extra ray), vllm: vLLM (extra vllm).",
)
@click.option(
    "--engine-option", multiple=True, metavar="K=V", help="Argument of vllm.LLM, such as tensor_parallel_size=8."
)
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="With --engine ray: how many workers.  [default: 1]"
)
@click.option(
    "--gpus-per-worker",
    type=click.FloatRange(0),
    metavar="G",
    help="With --engine ray.  [default: 1 where the cluster has GPUs]",
)
@click.option(
    "--ray-address", metavar="A", help="With --engine ray: a running cluster.  [default: one on this machine alone]"
)
@click.option("--dry-run", is_flag=True, help="Only say what the run would capture, fill and take.")
@click.option("--force", is_flag=True, help="Start even if the disk has too little room.")
@output_options
def capture(**given: Any) -> int:
    """Run M over the conversations in F and write the hidden states of its layers to OUT.

    OUT can be filled in several goes: the same command goes on where an earlier one stopped.
    """
    from ..run import Stopping, capture_dataset
    from .progress import shown_progress
    from .quiet_libraries import quiet_libraries

    quiet_libraries()
    settings, stopping = _settings(given), Stopping()
    if given["dry_run"]:
        return _dry_run(settings, quiet=given["quiet"], as_json=given["as_json"])
    # Of several processes on one run, as torchrun starts them, the first one speaks.
    is_first = os.environ.get("RANK", "0") == "0"
    quiet = given["quiet"] or not is_first
    with shown_progress(quiet) as progress, stopping.on_signals():
        summary = capture_dataset(settings, progress, stopping)
    if given["as_json"] and is_first:
        show_json({**json_value(summary), "tokens_per_second": summary.tokens_per_second})
    elif not quiet:
        _show(summary)
    _say_if_nothing(summary, quiet=quiet)
    return 0 if summary.captured else 1


def _dry_run(settings: Any, *, quiet: bool, as_json: bool) -> int:
    from ..run import estimate_run
    from .progress import shown_progress

    with shown_progress(quiet) as progress:
        result = estimate_run(settings, progress)
    if as_json:
        show_json({**json_value(result), "seconds": result.seconds, "fits": result.fits})
    elif not quiet:
        _show_estimate(result, settings.out)
    if not result.fits and not settings.force:
        click.echo(
            "hiddentap: the disk has too little room; make some, choose another folder, or start with --force", err=True
        )
        return 1
    return 0 if result.audit.captured and not result.audit.ending else 1


def _show_estimate(result: RunEstimate, out: Path) -> None:
    from .audit import show_audit
    from .stretch import duration
    from .tables import size, table

    show_audit(result.audit)
    rows = [
        ("bytes", f"{size(result.bytes_needed)} of rows; {size(result.bytes_free)} free at {out}"),
        (
            "time",
            f"about {duration(result.seconds)} at {result.tokens_per_second:,.0f} tokens/s, tried on samples of the input",
        ),
    ]
    click.echo(table(rows))


def _settings(given: dict[str, Any]) -> Any:
    from ..run import CaptureSettings

    return CaptureSettings(
        model=model_source(given),
        data=given["data"],
        out=given["out"],
        layer_ids=layer_ids(given["ids"]),  # type: ignore[arg-type]  # the check of layer ids names what is no integer
        convention=given["convention"],
        ids_of=given["ids_of"],
        draft_config=given["draft_config"],
        algorithm=given["algorithm"],
        adapter=given["adapter"],
        final=given["final"],
        head=given["head"],
        top_logits=given["top_logits"],
        text=text_settings(given),
        store_dtype=given["store_dtype"],
        batch_tokens=given["batch_tokens"],
        exact=given["exact"],
        compile=given["compile"],
        shard_rows=given["shard_rows"],
        on_bad_values=given["on_bad_values"],
        force=given["force"],
        engine=given["engine"],
        engine_options=key_values(given["engine_option"], "--engine-option"),
        tp=given["tp"],
        ray=_ray_workers(given),
    )  # fmt: skip


def _ray_workers(given: dict[str, Any]) -> Any:
    from ..run import RayWorkers

    names = {"workers": "count", "gpus_per_worker": "gpus", "ray_address": "address"}
    fields = {field: given[name] for name, field in names.items() if given[name] is not None}
    if fields and given["engine"] != "ray":
        raise click.UsageError("--workers, --gpus-per-worker and --ray-address need --engine ray.")
    return RayWorkers(**fields)


def _show(summary: RunSummary) -> None:
    from .tables import size, table

    rows = [
        ("samples", f"{summary.captured:,} captured, {summary.rejected:,} rejected"),
        ("tokens", f"{summary.tokens:,}, {summary.supervised_tokens:,} supervised"),
        ("layers", f"{', '.join(map(str, summary.layer_ids))} ({summary.convention}), H = {summary.hidden_size}"),
        ("bytes", f"{size(summary.bytes)} in {summary.shards} shard(s)"),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s over {summary.seconds:.1f} s"),
        ("files", str(summary.out)),
    ]
    if summary.shards_done_before:
        rows.insert(4, ("done before", f"{summary.shards_done_before} shard(s)"))
    if summary.truncated:
        rows.insert(2, ("truncated", f"{summary.truncated:,} samples"))
    rows += [("rejected", f"{count:,} {code}") for code, count in summary.rejected_by_code.items()]
    rows += [("warning", f"{count:,} {code}") for code, count in summary.warnings.items()]
    rows += [("model", note) for note in summary.notes]
    click.echo(table(rows))
    if summary.rejected:
        click.echo(f"Rejected rows, with their reasons: {summary.out / 'rejects.jsonl'}")


def _say_if_nothing(summary: RunSummary, *, quiet: bool) -> None:
    if not (summary.captured or quiet):
        why = "" if summary.rejected else ": the input has no rows"
        click.echo(f"hiddentap: nothing was captured{why}", err=True)
