"""Settings that refuse values of the wrong type when they are made, before any work is done with them."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import UsageError, UsageTypeError

_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a string", Path: "a path"}


class CheckedFields:
    """Base of frozen dataclasses that check the types of their fields on construction.

    A subclass with rules of its own extends `__post_init__`: what it takes in another form it converts first, then calls
    ``super().__post_init__()``, then checks values. Of several bases each is called once, so groups of settings combine by
    inheritance.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _checked(field.name, value, hints[field.name]))

    def require_at_least(self, **least: int) -> None:
        """Raise UsageError where a field is below its least value; None stands for a default and passes."""
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise UsageError(f"{name} must be at least {limit}; got {value}.")


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it: a path of a string, a tuple of a list, a float of an integer; else refused."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        fits, taken = _taken(value, option)
        if fits:
            return taken
    for option in options:
        if isinstance(value, str) and get_origin(option) is Literal:
            raise UsageError(f"{name} must be {_word(option)}; got {value!r}.")
    expected = " or ".join(_word(option) for option in options)
    raise UsageTypeError(f"{name} must be {expected}; got {value!r} ({type(value).__name__}).")


def _taken(value: Any, hint: Any) -> tuple[bool, Any]:
    origin = get_origin(hint)
    if hint is Any:
        return True, value
    if hint is type(None):
        return value is None, None
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint), value
    if origin in (tuple, Sequence):
        return _taken_tuple(value, get_args(hint)[0])
    if origin is not None:
        return isinstance(value, origin), value
    if hint is Path and isinstance(value, str):
        return True, Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), value


def _taken_tuple(values: Any, hint: Any) -> tuple[bool, Any]:
    if not isinstance(values, list | tuple):
        return False, values
    taken = [_taken(value, hint) for value in values]
    return all(fits for fits, _ in taken), tuple(value for _, value in taken)


def _word(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if origin in (tuple, Sequence):
        return f"a list, each item {_word(get_args(hint)[0])}"
    if hint is type(None):
        return "None"
    if origin is Mapping:
        return "a mapping"
    if is_dataclass(hint) and isinstance(hint, type):
        return f"a {hint.__name__}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
