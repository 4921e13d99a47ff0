"""Options that several commands share, in groups, and how their text becomes values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from ...models.choices import Algorithm, Convention, DtypeName, Final, IdsFormat, LossOn, OnDropped, OnTooLong, Think
from .groups import DtypeChoice, OptionGroup, choice, option, values

if TYPE_CHECKING:
    from ...models.model_source import ModelSource
    from ..settings import TextSettings

Command = TypeVar("Command", bound=Callable[..., Any])

_INTEGER = re.compile(r"[+-]?\d+")


def layer_ids(text: str | None) -> tuple[int | str, ...] | None:
    """Return ``1,14,26`` as integers. What is no integer stays text: the check of layer ids names it."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return tuple(int(part) if _INTEGER.fullmatch(part) else part for part in parts)


def key_values(pairs: tuple[str, ...], option: str) -> dict[str, Any]:
    """Return ``K=V`` pairs; V is read as JSON where it is JSON (false, 3, "x", [1]) and is a string otherwise."""
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected K=V; got {pair!r}.", param_hint=option)
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def template_text(path: Path | None) -> str | None:
    """Return the chat template in a file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise click.BadParameter(f"{path} cannot be read ({why})", param_hint="--chat-template") from error


def pairs_option(*names: str, **settings: Any) -> click.Option:
    """Return a repeatable option of ``K=V`` pairs, whose value is their mapping."""
    return option(
        *names,
        multiple=True,
        metavar="K=V",
        callback=lambda _, param, value: key_values(value, param.opts[-1]),
        **settings,
    )


def layer_ids_option(name: str, help_text: str) -> click.Option:
    """Return the option ``--layer-ids``, whose value is a tuple of ids."""
    return option(
        "--layer-ids", name, metavar="I,J,...", callback=lambda _, __, value: layer_ids(value), help=help_text
    )


MODEL = OptionGroup(
    "Model",
    (
        option("--model", "name", required=True, metavar="M", help="Folder or hub id of the model."),
        option("--revision", metavar="R", help="Branch, tag or commit of a hub model."),
        option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    ),
)
COMPUTE = OptionGroup(
    "Model",
    (
        option(
            "--dtype", type=DtypeChoice(get_args(DtypeName)), default="auto", show_default=True,
            help="Compute dtype (bf16, fp16 and fp32 work too); auto: the one in the config.",
        ),
        option("--device", default="auto", show_default=True, help="Device of the model: auto, cpu, cuda, cuda:1, ..."),
        option("--device-map", metavar="MAP", help="Spread the model over devices: auto, balanced, ... (needs accelerate)."),
        option(
            "--attn-implementation", metavar="NAME",
            help="Attention: eager, sdpa, flash_attention_2, ...  [default: transformers' choice; capture: hiddentap's blocked "
            "attention on some CPUs]",
        ),
        option(
            "--keep-quantized", is_flag=True,
            help="Compute in the checkpoint's own quantized arithmetic instead of dequantizing its weights.",
        ),
        option(
            "--peft", metavar="ADAPTER",
            help="Apply this adapter, a folder or hub id (needs peft); none: leave out the one in the model's folder.",
        ),
    ),
)  # fmt: skip
LAYERS = OptionGroup(
    "Layers",
    (
        layer_ids_option("layer_ids", "Decoder layers, such as 1,14,26 (see `hiddentap layers M`)."),
        option(
            "--convention", type=choice(Convention),
            help="Meaning of layer id k: output of 0-based layer k, or state after k layers.  [default: layer_output]",
        ),
        option(
            "--ids-of", metavar="SYSTEM",
            help="Engine or trainer whose layer ids these are (vllm, specforge, ...; see `hiddentap layers M`); replaces "
            "--convention.",
        ),
        option(
            "--draft-config", type=click.Path(), metavar="FILE",
            help="Read the ids from a draft model's config.json; needs --ids-of.",
        ),
        option("--algorithm", type=choice(Algorithm), help="Use the default layers of this algorithm."),
        option(
            "--adapter", metavar="NAME",
            help="How to read the hidden state if a layer has several candidates for it; the error lists the adapters that fit.",
        ),
        option(
            "--final", type=choice(Final), default="pre", show_default=True,
            help="Also store the state before (pre) or after (post) the final norm.",
        ),
    ),
)  # fmt: skip
DATA = OptionGroup(
    "Input",
    (
        option(
            "--data", multiple=True, required=True, metavar="F",
            help="Input file (.jsonl, .jsonl.gz, .json, .parquet) or dataset. Repeatable.",
        ),
    ),
)  # fmt: skip
ROWS = OptionGroup(
    "Input",
    (
        option("--limit", type=click.IntRange(1), metavar="N", help="Read only the first N input rows."),
        option(
            "--chat-template", type=click.Path(path_type=Path), metavar="FILE",
            callback=lambda _, __, path: template_text(path), help="Jinja file to use as the chat template.",
        ),
        pairs_option("--template-arg", "template_args", help="Template argument, such as enable_thinking=false. Repeatable."),
    ),
)  # fmt: skip
TEXT = OptionGroup(
    "Input",
    (
        option("--max-length", type=click.IntRange(1), default=4096, show_default=True, help="Maximum tokens per sample."),
        option(
            "--on-too-long", type=choice(OnTooLong), default="truncate", show_default=True,
            help="What to do with longer rows.",
        ),
        option(
            "--loss-on", type=choice(LossOn), default="assistant", show_default=True,
            help="Tokens in the loss mask; last: the last assistant turn only. Text without turns is all supervised.",
        ),
        option(
            "--think", type=choice(Think), default="keep", show_default=True,
            help="Keep the assistant's thinking (<think> to </think>) in the loss mask, or take it out (mask).",
        ),
        option(
            "--ids-format", type=choice(IdsFormat), default="plain", show_default=True,
            help="Supervision of input_ids without a loss_mask; plain: all tokens, kimi: the assistant's turns.",
        ),
        option(
            "--on-dropped", type=choice(OnDropped), default="reject", show_default=True,
            help="Rows that lose tools, tool calls, reasoning or messages in the template: reject or keep; raise: abort.",
        ),
        option("--strict", is_flag=True, help="Abort at the first row that is rejected or only partly rendered."),
        option(
            "--max-reject-rate", type=click.FloatRange(0, 1), default=0.1, show_default=True, metavar="R",
            help="Abort if more than this share of the rows is rejected (from 20 rows on).",
        ),
        option("--allow-rejects", is_flag=True, help="Accept any share of rejects: --max-reject-rate 1."),
    ),
)  # fmt: skip
TOKENIZING = OptionGroup(
    "Speed",
    (
        option(
            "--tokenize-workers", "--tokenise-workers", "workers", type=click.IntRange(0), default=0, show_default=True,
            metavar="N",
            help="Number of tokenizer processes; 0: tokenize in the main process.",
        ),
    ),
)  # fmt: skip
HEAD = option("--head", is_flag=True, help="Write the final norm, lm_head and embeddings to OUT/head.")
SHARD_ROWS = option(
    "--shard-rows", type=click.IntRange(1), default=262_144, show_default=True, help="Maximum rows per shard."
)
JSON = option("--json", "as_json", is_flag=True, help="Print the result as one JSON object (docs/reference/json.md).")
REPORTING = OptionGroup(
    "Other", (option("--quiet", is_flag=True, help="Print no progress and no summary, only errors."), JSON)
)


def say_if_nothing(done: int, rejected: int, *, what: str = "captured", where: str = "") -> None:
    """Print one line on standard error where nothing came of a command, with --quiet too: it ends with 1."""
    if not done:
        why = f": all {rejected:,} input rows were rejected{where}" if rejected else ": the input has no rows"
        click.echo(f"hiddentap: nothing was {what}{why}", err=True)


def output_options(function: Command) -> Command:
    """Add the options of REPORTING to a command of few options."""
    return json_option(click.option("--quiet", is_flag=True, help=REPORTING.options[0].help)(function))


def json_option(function: Command) -> Command:
    """Add --json to a command of few options."""
    return click.option("--json", "as_json", is_flag=True, help=JSON.help)(function)


def model_source(given: Mapping[str, Any], *groups: OptionGroup) -> ModelSource:
    """Return the model that MODEL, and with it `groups`, were given."""
    from ...models.model_source import ModelSource

    return ModelSource(**values(given, MODEL, *groups))


def text_settings(given: Mapping[str, Any]) -> TextSettings:
    """Return how input rows become samples, as ROWS, TEXT and TOKENIZING were given it."""
    from ..settings import TextSettings

    return TextSettings(**values(given, ROWS, TEXT, TOKENIZING))
