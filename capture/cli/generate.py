"""`hiddentap generate`: prompts in, shards of answers, hidden states and sampling outputs out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ...models.choices import Turns
from ..engines import ENGINES
from .capture import ENGINE_OPTION, PLACE
from .groups import OptionGroup, choice, grouped, option, values
from .options import COMPUTE, DATA, HEAD, LAYERS, MODEL, REPORTING, ROWS, SHARD_ROWS, model_source, say_if_nothing
from .output import show_json

if TYPE_CHECKING:
    from ..sampling.generation_settings import GenerationSettings
    from ..sampling.generation_summary import GenerationSummary

FOLDER = OptionGroup("Output", (HEAD, SHARD_ROWS))
TURNS = OptionGroup(
    "Input",
    (
        option(
            "--turns", type=choice(Turns), default="last", show_default=True,
            help="Assistant turns to generate; all: in order, each after the new versions of the earlier ones.",
        ),
        option("--drop-truncated", is_flag=True, help="Reject samples in which the length limit cut an answer off."),
    ),
)  # fmt: skip
ENGINE = OptionGroup(
    "Engine",
    (
        option(
            "--engine", type=click.Choice([name for name, entry in ENGINES.items() if entry.answers]), default="hf",
            show_default=True, help="Engine that generates the answers; vllm: hf then captures their rows.",
        ),
        ENGINE_OPTION,
    ),
)  # fmt: skip
SAMPLING = OptionGroup(
    "Sampling",
    (
        option(
            "--max-new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Maximum tokens of an answer."
        ),
        option(
            "--temperature", type=float, default=1.0, show_default=True,
            help="Divide the logits by this; 0: greedy decoding.",
        ),
        option(
            "--top-p", type=float, default=1.0, show_default=True,
            help="Keep the most likely tokens of this total probability; 1: all.",
        ),
        option(
            "--top-k", type=click.IntRange(0), default=0, show_default=True, help="Keep the K most likely tokens; 0: all."
        ),
        option(
            "--min-p", type=float, default=0.0, show_default=True,
            help="Drop tokens below this share of the most likely token's probability.",
        ),
        option(
            "--repetition-penalty", type=float, default=1.0, show_default=True,
            help="Penalize tokens seen before; 1: off.",
        ),
        option(
            "--presence-penalty", type=float, default=0.0, show_default=True,
            help="Subtract this from the logits of tokens in the answer.",
        ),
        option(
            "--frequency-penalty", type=float, default=0.0, show_default=True,
            help="Subtract this from a token's logit per occurrence in the answer.",
        ),
        option(
            "--seed", type=click.IntRange(0), metavar="N",
            help="Sample row i with seed N + i.  [default: a new random seed per row]",
        ),
        option("--stop", multiple=True, metavar="TEXT", help="Stop string. Repeatable."),
        option(
            "--stop-token-id", "stop_token_ids", multiple=True, type=click.IntRange(0), metavar="ID",
            help="Additional stop token id. Repeatable.",
        ),
        option("--ignore-eos", is_flag=True, help="Do not stop at the model's end-of-sequence tokens."),
    ),
)  # fmt: skip
RECORDED = OptionGroup(
    "Output",
    (
        option(
            "--sampling-mask", "return_sampling_mask", is_flag=True,
            help="Store each token's sampling mask (the token ids that it was sampled from) and its log-probability among them.",
        ),
        option("--logprobs", "return_logprob", is_flag=True, help="Store each token's log-probability under the model."),
        option(
            "--top-logits", type=click.IntRange(0), default=0, show_default=True, help="Store the N largest logits of each row."
        ),
    ),
)  # fmt: skip
STEPS = OptionGroup(
    "Speed",
    (
        option(
            "--max-batch", type=click.IntRange(1), default=16, show_default=True, help="Maximum concurrent requests."
        ),
        option("--prefill-chunk", type=click.IntRange(1), metavar="N", help="Prefill prompts in chunks of N tokens."),
        option(
            "--prompt-lookup", type=click.IntRange(0), default=0, metavar="K", show_default=True,
            help="Speculate up to K tokens per step by prompt lookup, verified in one forward.",
        ),
        option(
            "--sampling-mask-max-tokens", type=click.IntRange(1), default=4096, show_default=True,
            help="Abort a request if a sampling mask has more token ids than this.",
        ),
    ),
)  # fmt: skip


@grouped(MODEL, COMPUTE, LAYERS, DATA, ROWS, TURNS, SAMPLING, PLACE, FOLDER, RECORDED, STEPS, ENGINE, REPORTING)
def generate(**given: Any) -> int:
    """Answer the prompts in F with M; write its hidden states and sampling outputs to OUT.

    A row of F is a conversation (messages), a text or input_ids. If a conversation ends with an assistant turn, that turn is
    dropped and generated again; with --turns all every assistant turn is. A stopped run resumes if the command is repeated.
    """
    from ..regeneration import RegenerationSummary, regenerate_dataset
    from ..run import Stopping
    from ..sampling.dataset_run import generate_dataset
    from .generation_stopped import check_stopped
    from .output import quiet_libraries
    from .progress import shown_progress
    from .regeneration import show_regeneration

    quiet_libraries()
    settings, stopping = _settings(given), Stopping()
    check = partial(check_stopped, stopping, settings.out)
    summary: GenerationSummary | RegenerationSummary
    with stopping.on_signals(), shown_progress(given["quiet"], check) as progress:
        if settings.rows_of_steps:
            summary = generate_dataset(settings, progress, stopping.check)
        else:
            summary = regenerate_dataset(settings, progress, stopping)
    if given["as_json"]:
        show_json(summary)
    elif not given["quiet"]:
        if isinstance(summary, RegenerationSummary):
            show_regeneration(summary)
        else:
            _show(summary)
    say_if_nothing(summary.captured, summary.rejected, where=f"; see {summary.out / 'rejects.jsonl'}")
    return 0 if summary.captured else 1


def _settings(given: dict[str, Any]) -> GenerationSettings:
    from ..sampling import SamplingParams
    from ..sampling.generation.run import GenerationOptions
    from ..sampling.generation_settings import GenerationSettings
    from ..settings import InputSettings

    return GenerationSettings(
        model=model_source(given, COMPUTE),
        text=InputSettings(**values(given, ROWS)),
        params=SamplingParams(**values(given, SAMPLING, RECORDED)),
        options=GenerationOptions(**values(given, STEPS)),
        **values(given, DATA, PLACE, LAYERS, FOLDER, TURNS, ENGINE),
    )


def _show(summary: GenerationSummary) -> None:
    from .output import counted, share_of_top_logits, size, table

    speed = summary.new_tokens_now / summary.seconds if summary.seconds > 0 else 0.0
    rows = [
        ("samples", f"{summary.captured:,} captured, {summary.rejected:,} rejected"),
        ("tokens", f"{summary.prompt_tokens:,} of prompts, {summary.new_tokens:,} new; {summary.rows:,} rows"),
        ("ended by", counted(summary.finish_reasons) or "nothing ran"),
        ("layers", f"{', '.join(map(str, summary.layer_ids))} ({summary.convention}), H = {summary.hidden_size}"),
        ("bytes", f"{size(summary.bytes)} in {summary.shards} shard(s)"),
        ("speed", f"{speed:,.1f} new tokens/s over {summary.seconds:.1f} s"),
        ("files", str(summary.out)),
    ]
    if summary.shards_done_before:
        rows.append(("resumed", f"{summary.shards_done_before:,} of {summary.shards:,} shards were done before"))
    if summary.answers_dropped:
        rows.insert(2, ("answers", f"{summary.answers_dropped:,} last assistant turns were left out and written anew"))
    if summary.end_tokens:
        named = (f"{', '.join(map(str, tokens))} ({origin})" for origin, tokens in summary.end_tokens.items())
        rows.insert(3, ("end tokens", "; ".join(named)))
    if summary.top_logits_share is not None:
        rows.append(("top logits", share_of_top_logits(summary.top_logits_share, summary.top_logits_quantiles)))
    rows += [("rejected", f"{count:,} {code}") for code, count in summary.rejected_by_code.items()]
    rows += [("not read", f"field {name!r} of {count:,} rows") for name, count in summary.unread_fields.items()]
    rows += [("model", note) for note in summary.notes]
    click.echo(table(rows))
    if summary.rejected:
        click.echo(f"Rejected rows, with their reasons: {summary.out / 'rejects.jsonl'}")
