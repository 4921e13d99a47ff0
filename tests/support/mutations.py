"""A JSON value with each of its parts replaced by something of another kind, one at a time."""

import copy
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (None, 7, -1, 0.5, "x", [], [7], ["x"], {}, {"x": 7}, True)
Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where each part of `value` is; of a list the first item stands for all."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def mutated(value: Any) -> Iterator[tuple[str, Any]]:
    """Copies of `value`, each with one part replaced or taken out, and what was done."""
    for at in places(value):
        for odd in ODD:
            changed = copy.deepcopy(value)
            _owner(changed, at)[at[-1]] = odd
            yield f"{'.'.join(map(str, at))} = {odd!r}", changed
        changed = copy.deepcopy(value)
        del _owner(changed, at)[at[-1]]
        yield f"{'.'.join(map(str, at))} taken out", changed


def _owner(value: Any, at: Place) -> Any:
    for key in at[:-1]:
        value = value[key]
    return value
