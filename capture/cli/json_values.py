"""Results as one JSON object on standard output, for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click


def show_json(values: Any) -> None:
    """Print it on one line."""
    click.echo(json.dumps(json_value(values), ensure_ascii=False, allow_nan=False))


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
