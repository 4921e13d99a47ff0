"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ...models.loading import ModelSource
    from ..run import TextSettings

Command = TypeVar("Command", bound=Callable[..., Any])

_INTEGER = re.compile(r"[+-]?\d+")
_COMPUTE = ("dtype", "device", "device_map", "attn_implementation")


def layer_ids(text: str | None) -> tuple[int | str, ...] | None:
    """``1,14,26`` as integers. What is no integer stays text: the check of layer ids names it."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return tuple(int(part) if _INTEGER.fullmatch(part) else part for part in parts)


def key_values(pairs: tuple[str, ...], option: str) -> dict[str, Any]:
    """``K=V`` pairs; V is read as JSON where it is JSON (false, 3, "x", [1]) and is a string otherwise."""
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
    """The chat template in a file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", param_hint="--chat-template") from error


def text_settings(given: Mapping[str, Any]) -> TextSettings:
    """What `text_options` were given."""
    from ..run import TextSettings

    return TextSettings(
        max_length=given["max_length"],
        on_too_long=given["on_too_long"],
        loss_on=given["loss_on"],
        think=given["think"],
        ids_format=given["ids_format"],
        chat_template=template_text(given["chat_template"]),
        template_args=key_values(given["template_arg"], "--template-arg"),
        strict=given["strict"],
        limit=given["limit"],
        workers=given["tokenise_workers"],
        allow_rejects=given["allow_rejects"],
    )


def model_source(given: Mapping[str, Any]) -> ModelSource:
    """What `model_options` and `compute_options` were given; without the latter, the model as its config says."""
    from ...models.loading import ModelSource

    names = ("revision", "trust_remote_code", *_COMPUTE)
    return ModelSource(given["model"], **{name: given[name] for name in names if name in given})


def model_options(function: Command) -> Command:
    """Which model."""
    return _with(
        function,
        click.option("--model", required=True, metavar="M", help="Folder or hub id of the model."),
        click.option("--revision", metavar="R", help="Branch, tag or commit of a hub model."),
        click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run."),
    )


def compute_options(function: Command) -> Command:
    """How the model computes, and where."""
    return _with(
        function,
        click.option(
            "--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto", show_default=True,
            help="How the model computes; auto: as its config says.",
        ),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ..."),
        click.option("--device-map", metavar="MAP", help="Spread the model over devices, such as auto (needs accelerate)."),
        click.option(
            "--attn-implementation",
            metavar="NAME",
            help="eager, sdpa, flash_attention_2, ... (default: as transformers chooses; capture: maybe faster blocks on a CPU)",
        ),
    )  # fmt: skip


def tap_options(function: Command) -> Command:
    """Which layers, what their ids mean, which states of the final norm, and whether its weights too."""
    return _with(
        function,
        click.option(
            "--layer-ids", "ids", metavar="I,J,...", help="Decoder layers, such as 1,14,26 (see `hiddentap layers M`)."
        ),
        click.option(
            "--convention", type=click.Choice(["layer_output", "boundary"]), default="layer_output", show_default=True,
            help="What a layer id k means: the output of 0-based layer k, or the state after k layers.",
        ),
        click.option(
            "--final", type=click.Choice(["none", "pre", "post", "both"]), default="pre", show_default=True,
            help="Store what enters (pre) or leaves (post) the final norm too.",
        ),
        click.option("--head", is_flag=True, help="Write final norm, lm_head and embeddings to OUT/head."),
    )  # fmt: skip


def input_options(function: Command) -> Command:
    """Which rows are read, and how a conversation is rendered."""
    return _with(
        function,
        click.option("--data", multiple=True, required=True, metavar="F", help="Input: .jsonl, .jsonl.gz, .json, or a data set."),
        click.option("--limit", type=click.IntRange(1), metavar="N", help="Read only the first N input rows."),
        click.option("--chat-template", type=click.Path(path_type=Path), metavar="FILE", help="Use this template."),
        click.option("--template-arg", multiple=True, metavar="K=V", help="Template argument, such as enable_thinking=false."),
    )  # fmt: skip


def text_options(function: Command) -> Command:
    """How whole conversations become tokens and loss masks."""
    return _with(
        function,
        input_options,
        click.option("--max-length", type=click.IntRange(1), default=4096, show_default=True, help="Most tokens of a sample."),
        click.option(
            "--on-too-long", type=click.Choice(["truncate", "drop"]), default="truncate", show_default=True,
            help="What becomes of longer rows.",
        ),
        click.option(
            "--loss-on", type=click.Choice(["assistant", "all"]), default="assistant", show_default=True,
            help="Which tokens the loss mask marks; rows of plain text are marked throughout.",
        ),
        click.option(
            "--think", type=click.Choice(["keep", "mask"]), default="keep", show_default=True,
            help="Whether the loss mask keeps thinking that the assistant writes, <think> to </think>.",
        ),
        click.option(
            "--ids-format", type=click.Choice(["plain", "kimi"]), default="plain", show_default=True,
            help="How rows of input_ids without a loss_mask are marked: plain, throughout; kimi, the assistant's turns.",
        ),
        click.option(
            "--tokenise-workers", type=click.IntRange(0), default=0, show_default=True, metavar="N",
            help="Tokenising processes; 0: none.",
        ),
        click.option("--strict", is_flag=True, help="End at the first row that is rejected or not rendered whole."),
        click.option("--allow-rejects", is_flag=True, help="Go on even if loss masks fail on more than 5 % of the rows."),
    )  # fmt: skip


def output_options(function: Command) -> Command:
    """What is said of the work: on standard error while it goes on, on standard output at its end."""
    return _with(function, click.option("--quiet", is_flag=True, help="No progress and no summary."), json_option)


def json_option(function: Command) -> Command:
    """Whether the result is for a script."""
    option = click.option(
        "--json", "as_json", is_flag=True, help="Print the result as one JSON object (docs/reference/json.md)."
    )
    return _with(function, option)


def _with(function: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        function = option(function)
    return function
