"""Output of a command: tables for people, one JSON object for scripts, no output of libraries."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click

from .own_stdout import own_stdout
from .printable import printable

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def show_json(values: Any) -> None:
    """Print it on one line."""
    click.echo(json.dumps(json_value(values), ensure_ascii=False, allow_nan=False), file=own_stdout())


def json_value(value: Any) -> Any:
    """Dataclasses become objects of their fields, sequences lists, paths text; numbers that are not finite become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(one) for key, one in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [json_value(one) for one in value]
    return value


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Name and value, one pair a line, values under each other."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {printable(value)}" for name, value in rows)


def warning_lines(warnings: Mapping[str, int], first: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a line for each warning: how often, and where first."""
    return [
        ("warning", f"{count:,} {code}" + (f"; first {first[code]}" if code in first else ""))
        for code, count in warnings.items()
    ]


def counted(reasons: Mapping[str, int]) -> str:
    """Return why answers ended, counted, as a summary line: ``2 length, 5 stop_token``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))


def share_of_top_logits(share: float, quantiles: Mapping[str, float] | None) -> str:
    """Return the share of the model's distribution that the stored top logits keep, as a summary line."""
    mean = f"hold {share:.1%} of the probability, on average"
    if quantiles is None:
        return mean
    return f"{mean}; {quantiles['0.5']:.1%} in the median row, at most {quantiles['0.05']:.1%} in 5 % of the rows"


def size(count: int) -> str:
    """Return a number of bytes in decimal units: ``45.2 MB``."""
    if count < 1000:
        return f"{count} bytes"
    power = min((len(str(count)) - 1) // 3, len(_UNITS))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"


def quiet_libraries() -> None:
    """Keep the model library's own bars and hints off the screen: the command says itself what matters of them."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
