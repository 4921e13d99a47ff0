"""Strict JSON of one row."""

import json
import math
from collections.abc import Mapping
from typing import Any

from .row_error import RowError


def parse_object(payload: bytes) -> Mapping[str, Any]:
    """The object a row's JSON text holds.

    Raises RowError for text that is not UTF-8 or not JSON, NaN and infinite numbers, a key given twice, nesting or
    integers beyond the parser's limits, and JSON that is no object.
    """
    try:
        value = _DECODER.decode(payload.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("not_utf8", f"expected UTF-8; found {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RowError("bad_json", f"expected one JSON object; found {_fault(error)}") from error
    except RecursionError as error:
        raise RowError("too_deep", "expected JSON within the parser's nesting limit; found deeper nesting") from error
    except ValueError as error:
        raise RowError("number_too_long", f"expected numbers within the parser's limit; found {error}") from error
    if not isinstance(value, dict):
        raise RowError("not_an_object", f"expected a JSON object; found a {type(value).__name__}")
    return value


def _fault(error: json.JSONDecodeError) -> str:
    # The parser counts lines of its own, which a reader would take for lines of the source.
    return f"{error.msg[0].lower()}{error.msg[1:]} at character {error.pos + 1} of the row"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise RowError("duplicate_key", f"expected each key once; found {repeated!r} twice in one object")
    return found


def _float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise RowError("bad_number", f"expected finite numbers; found {literal[:40]}")
    return value


def _constant(literal: str) -> float:
    raise RowError("bad_number", f"expected finite numbers; found {literal}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
