"""`hiddentap capture`: conversations in, shards of hidden states out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ...models.choices import CompileMode, CpuFastPaths, OnBadValues, StoreDtypeName
from ..engines import ENGINES
from .groups import DtypeChoice, OptionGroup, choice, grouped, option, values
from .options import (
    COMPUTE,
    DATA,
    HEAD,
    LAYERS,
    MODEL,
    REPORTING,
    ROWS,
    SHARD_ROWS,
    TEXT,
    TOKENIZING,
    model_source,
    pairs_option,
    say_if_nothing,
    text_settings,
)
from .output import json_value, show_json

if TYPE_CHECKING:
    from ..run import CaptureSettings, RunSummary
    from ..run.estimate import RunEstimate
    from ..run.pacing.block_estimate import BlockEstimate

PLACE = OptionGroup(
    "Output", (option("--out", type=click.Path(), required=True, metavar="OUT", help="Folder to fill."),)
)
STORE = OptionGroup(
    "Output",
    (
        HEAD,
        option(
            "--top-logits", type=click.IntRange(0), default=0, metavar="K",
            help="Store the K largest logits of each row, their ids and the log-sum-exp.",
        ),
        option(
            "--top-logits-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, metavar="P",
            help="Of the K largest logits, store the fewest whose probabilities add up to P.",
        ),
        option(
            "--store-dtype", type=DtypeChoice(get_args(StoreDtypeName)),
            help="Dtype of the stored rows.  [default: as computed]",
        ),
        SHARD_ROWS,
        option(
            "--on-bad-values", type=choice(OnBadValues), default="reject", show_default=True,
            help="Samples with rows of NaN, infinity or zeros only: reject or keep; raise: abort.",
        ),
        option("--force", is_flag=True, help="Start even if the disk is too small."),
    ),
)  # fmt: skip
SPEED = OptionGroup(
    "Speed",
    (
        option(
            "--batch-tokens", type=click.IntRange(1), metavar="N",
            help="Positions per forward, padding included.  [default: tuned on the first batches]",
        ),
        option("--exact", is_flag=True, help="One sample per forward: rows are bit-equal to those of a plain forward."),
        option(
            "--prefill-chunk", type=click.IntRange(1), metavar="N",
            help="Run samples of more than N tokens in chunks of N behind a KV cache, to save memory on long contexts.",
        ),
        option(
            "--compile", type=choice(CompileMode), default="auto", show_default=True,
            help="Compile decoder layers; auto: if compilation saves more time than it costs.",
        ),
        option(
            "--tp", type=click.IntRange(1), default=1, metavar="N",
            help="Tensor parallelism under torchrun: N processes share one copy of the model.  [default: 1]",
        ),
        option(
            "--stream-weights", is_flag=True,
            help="For a model larger than memory: read each layer from disk once per block of batches.",
        ),
        option(
            "--block-tokens", type=click.IntRange(1), metavar="N",
            help="Positions per block of --stream-weights.  [default: as many as fit in memory]",
        ),
        option(
            "--cpu-fast-paths", type=choice(CpuFastPaths), default="auto", show_default=True,
            help="Use attention, matmuls and malloc settings that are faster on this CPU.",
        ),
    ),
)  # fmt: skip
ENGINE_OPTION = pairs_option(
    "--engine-option", "engine_options", help="Argument of vllm.LLM, such as tensor_parallel_size=8. Repeatable."
)
ENGINE = OptionGroup(
    "Engine",
    (
        option(
            "--engine", type=click.Choice(list(ENGINES)), default="hf", show_default=True,
            help=f"Inference backend; {', '.join(f'{name}: {entry.about}' for name, entry in ENGINES.items())}.",
        ),
        ENGINE_OPTION,
    ),
)  # fmt: skip
RAY = OptionGroup(
    "Engine",
    (
        option(
            "--workers", "count", type=click.IntRange(1), default=1, metavar="N",
            help="With --engine ray: number of workers.  [default: 1]",
        ),
        option(
            "--gpus-per-worker", "gpus", type=click.FloatRange(0), metavar="G",
            help="With --engine ray: GPUs per worker.  [default: 1 if the cluster has GPUs]",
        ),
        option(
            "--ray-address", "address", metavar="A",
            help="With --engine ray: address of a running cluster.  [default: a new one on this machine]",
        ),
    ),
)  # fmt: skip
DRY_RUN = OptionGroup(
    "Output",
    (
        option(
            "--dry-run", is_flag=True, help="Show the taps, and estimate samples, disk space and time, without running."
        ),
    ),
)


@grouped(
    MODEL, COMPUTE, LAYERS, DATA, ROWS, TEXT, PLACE, STORE, DRY_RUN, SPEED, TOKENIZING, ENGINE, RAY, REPORTING,
)  # fmt: skip
def capture(**given: Any) -> int:
    """Run M over the conversations in F and write the hidden states of its layers to OUT.

    Run the same command again to resume a run that was stopped.
    """
    from ..run import Stopping, capture_dataset
    from .output import quiet_libraries
    from .progress import shown_progress

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
    if is_first:
        say_if_nothing(summary.captured, summary.rejected, where=f"; see {summary.out / 'rejects.jsonl'}")
    return 0 if summary.captured else 1


def _dry_run(settings: CaptureSettings, *, quiet: bool, as_json: bool) -> int:
    from ..run import estimate_run
    from .audit import show_ending
    from .progress import shown_progress

    with shown_progress(quiet) as progress:
        result = estimate_run(settings, progress)
    if as_json:
        show_json({**json_value(result), "seconds": result.seconds, "fits": result.fits})
    elif not quiet:
        _show_estimate(result, settings.out)
    counted = result.audit
    if not result.fits and not settings.force:
        click.echo(
            "hiddentap: the disk is too small; free some space, choose another folder, or start with --force", err=True
        )
        return 1
    if not counted.ending:
        say_if_nothing(counted.captured, sum(counted.rejected.values()), what="left to capture")
    elif quiet or as_json:
        show_ending(counted)
    return 0 if counted.captured and not counted.ending else 1


def _show_estimate(result: RunEstimate, out: Path) -> None:
    from .audit import show_audit
    from .output import size, table
    from .progress import duration

    show_audit(result.audit)
    about = (
        f"about {duration(result.seconds)} at {result.tokens_per_second:,.0f} tokens/s, tried on samples of the input"
    )
    rows = [
        *(("tap", f"{tap.name}: {tap.reads}, the state after {tap.boundary} layers") for tap in result.taps),
        ("bytes", f"{size(result.bytes_needed)} of rows; {size(result.bytes_free)} free at {out}"),
        ("time", about if result.untimed is None else f"not estimated: {result.untimed}"),
    ]
    click.echo(table(rows + _block_rows(result.block)))


def _block_rows(block: BlockEstimate | None) -> list[tuple[str, str]]:
    """Return rows for what streamed weights read and hold; none without them."""
    from .output import size

    if block is None:
        return []
    blocks = f"{block.blocks} of {block.tokens:,} tokens in about {block.batches:,} batches"
    read = (
        f"{size(block.bytes_per_block)} per block, {size(block.bytes_read)} in all, at {size(int(block.read_rate))}/s"
    )
    memory = (
        f"{size(block.memory)}: two layers of {size(block.layer_bytes)}, {size(block.outside_bytes)} outside the layers, "
        f"{size(block.state_bytes)} of states; the activations of one batch come on top"
    )
    return [("blocks", blocks), ("read", read), ("memory", memory)]


def _settings(given: dict[str, Any]) -> CaptureSettings:
    from ..run import CaptureSettings, RayWorkers

    return CaptureSettings(
        model=model_source(given, COMPUTE),
        text=text_settings(given),
        ray=RayWorkers(**values(given, RAY)),
        **values(given, DATA, PLACE, LAYERS, STORE, SPEED, ENGINE),
    )


def _speed(summary: RunSummary) -> str:
    if not summary.tokens_now:
        return "nothing was left to capture" if summary.shards_done_before else "nothing was captured"
    return f"{summary.tokens_per_second:,.0f} tokens/s over {summary.seconds:.1f} s"


def _show(summary: RunSummary) -> None:
    from .output import share_of_top_logits, size, table, warning_lines

    rows = [
        ("samples", f"{summary.captured:,} captured, {summary.rejected:,} rejected"),
        ("tokens", f"{summary.tokens:,}, {summary.supervised_tokens:,} supervised"),
        ("layers", f"{', '.join(map(str, summary.layer_ids))} ({summary.convention}), H = {summary.hidden_size}"),
        ("bytes", f"{size(summary.bytes)} in {summary.shards} shard(s)"),
        ("speed", _speed(summary)),
        ("files", str(summary.out)),
    ]
    if summary.shards_done_before:
        rows.insert(4, ("done before", f"{summary.shards_done_before} shard(s)"))
    if summary.truncated:
        rows.insert(2, ("truncated", f"{summary.truncated:,} samples"))
    if summary.top_logits_share is not None:
        rows.append(("top logits", share_of_top_logits(summary.top_logits_share, summary.top_logits_quantiles)))
    rows += [
        ("rejected", f"{count:,} {code}; first {summary.first_reject[code]}")
        for code, count in summary.rejected_by_code.items()
    ]
    rows += warning_lines(summary.warnings, summary.first_warning)
    rows += [("not read", f"field {name!r} of {count:,} samples") for name, count in summary.unread_fields.items()]
    rows += [("model", note) for note in summary.notes]
    click.echo(table(rows))
    if summary.rejected:
        click.echo(f"Rejected rows, with their reasons: {summary.out / 'rejects.jsonl'}")
