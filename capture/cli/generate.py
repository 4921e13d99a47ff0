"""`hiddentap generate`: prompts in, shards of what the model answers, its hidden states and its sampling out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .json_values import show_json
from .options import (
    compute_options,
    input_options,
    key_values,
    layer_ids,
    model_options,
    model_source,
    output_options,
    tap_options,
    template_text,
)

if TYPE_CHECKING:
    from ..sampling.dataset_run import GenerationSettings, GenerationSummary


@click.command()
@model_options
@compute_options
@tap_options
@input_options
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="OUT", help="Empty or new folder.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Most tokens of an answer."
)
@click.option(
    "--temperature", type=float, default=1.0, show_default=True, help="Divides the logits; 0 takes the likeliest token."
)
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens of this mass; 1: all."
)
@click.option(
    "--top-k", type=click.IntRange(0), default=0, show_default=True, help="Keep the K likeliest tokens; 0: all."
)
@click.option(
    "--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the likeliest."
)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--presence-penalty", type=float, default=0.0, show_default=True)
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", help="Row i samples with seed N + i.  [default: a fresh one each]"
)
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends an answer; any number.")
@click.option("--stop-token-id", multiple=True, type=click.IntRange(0), metavar="ID", help="Token that ends one, too.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end tokens.")
@click.option("--sampling-mask", is_flag=True, help="Store the support of each token and its log-probability in it.")
@click.option(
    "--sampling-mask-max-tokens",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="A larger support ends the request.",
)
@click.option("--logprobs", is_flag=True, help="Store each token's log-probability under the model.")
@click.option(
    "--top-logits", type=click.IntRange(0), default=0, show_default=True, help="Store the N largest logits of each row."
)
@click.option(
    "--prompt-lookup",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    show_default=True,
    help="Guess up to K tokens a step from what was said before, and verify them in one forward.",
)
@click.option("--prefill-chunk", type=click.IntRange(1), metavar="N", help="Run prompts N tokens at a time.")
@click.option("--max-batch", type=click.IntRange(1), default=16, show_default=True, help="Requests under way at once.")
@click.option(
    "--shard-rows",
    type=click.IntRange(1),
    default=262_144,
    show_default=True,
    help="Rows after which a shard is sealed.",
)
@output_options
def generate(**given: Any) -> int:
    """Let M answer the prompts in F; write its hidden states and what was sampled from each position to OUT.

    A row of F is a conversation (messages), a text or input_ids. Of a conversation that ends with the assistant's turn, that turn
    is left out and written anew.
    """
    from ..run import Stopping
    from ..sampling.dataset_run import generate_dataset
    from .generation_stopped import check_stopped
    from .progress import shown_progress
    from .quiet_libraries import quiet_libraries

    quiet_libraries()
    settings, stopping = _settings(given), Stopping()
    check = partial(check_stopped, stopping, settings.out)
    with stopping.on_signals(), shown_progress(given["quiet"], check) as progress:
        summary = generate_dataset(settings, progress)
    if given["as_json"]:
        show_json(summary)
    elif not given["quiet"]:
        _show(summary)
    return 0 if summary.captured else 1


def _settings(given: dict[str, Any]) -> GenerationSettings:
    from ..sampling.dataset_run import GenerationSettings
    from ..sampling.generation_run import GenerationOptions

    return GenerationSettings(
        model=model_source(given),
        data=given["data"],
        out=given["out"],
        layer_ids=layer_ids(given["ids"]),  # type: ignore[arg-type]  # the check of layer ids names what is no integer
        params=_params(given),
        convention=given["convention"],
        final=given["final"],
        head=given["head"],
        options=GenerationOptions(
            given["prompt_lookup"], given["prefill_chunk"], given["max_batch"], given["sampling_mask_max_tokens"],
            given["shard_rows"],
        ),
        chat_template=template_text(given["chat_template"]),
        template_args=key_values(given["template_arg"], "--template-arg"),
        limit=given["limit"],
    )  # fmt: skip


def _params(given: dict[str, Any]) -> Any:
    from ..sampling import SamplingParams

    same = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        "max_new_tokens", "stop", "ignore_eos", "top_logits",
    )  # fmt: skip
    return SamplingParams(
        **{name: given[name] for name in same},
        stop_token_ids=given["stop_token_id"],
        return_sampling_mask=given["sampling_mask"],
        return_logprob=given["logprobs"],
    )


def _show(summary: GenerationSummary) -> None:
    from .tables import size, table

    speed = summary.new_tokens / summary.seconds if summary.seconds > 0 else 0.0
    ends = ", ".join(f"{count:,} {reason}" for reason, count in sorted(summary.finish_reasons.items()))
    rows = [
        ("samples", f"{summary.captured:,} captured, {summary.rejected:,} rejected"),
        ("tokens", f"{summary.prompt_tokens:,} of prompts, {summary.new_tokens:,} new; {summary.rows:,} rows"),
        ("ended by", ends or "nothing ran"),
        ("layers", f"{', '.join(map(str, summary.layer_ids))} ({summary.convention}), H = {summary.hidden_size}"),
        ("bytes", f"{size(summary.bytes)} in {summary.shards} shard(s)"),
        ("speed", f"{speed:,.1f} new tokens/s over {summary.seconds:.1f} s"),
        ("files", str(summary.out)),
    ]
    if summary.answers_dropped:
        rows.insert(2, ("answers", f"{summary.answers_dropped:,} last assistant turns were left out and written anew"))
    rows += [("rejected", f"{count:,} {code}") for code, count in summary.rejected_by_code.items()]
    rows += [("model", note) for note in summary.notes]
    click.echo(table(rows))
    if summary.rejected:
        click.echo(f"Rejected rows, with their reasons: {summary.out / 'rejects.jsonl'}")
