"""JSON records that carry a checksum of themselves, so that one changed on disk is told from one that was written so."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

KEY = "crc32"


def checksum(record: Mapping[str, Any]) -> str:
    """CRC-32 of the record's compact JSON with sorted keys, as eight hexadecimal digits; its own place is left out."""
    named = {name: value for name, value in record.items() if name != KEY}
    return data_checksum(json.dumps(named, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def data_checksum(data: bytes) -> str:
    """CRC-32 as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its checksum."""
    return {**record, KEY: checksum(record)}


def require_checksum(record: Mapping[str, Any], required: Collection[str], optional: Collection[str] = ()) -> None:
    """See that a record is as it was written.

    Records of earlier releases carry no checksum and are taken without; so a name that is not known is refused, which may be
    that of the checksum with a bit changed.

    Raises:
        ValueError: keys are missing or unknown, or the record does not match its checksum.
    """
    names = record.keys() - {KEY}
    missing, unknown = sorted(set(required) - names), sorted(names - set(required) - set(optional))
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if unknown:
        raise ValueError(f"it holds unknown entries: {', '.join(unknown)}")
    if KEY in record and record[KEY] != checksum(record):
        raise ValueError(f"its checksum is {checksum(record)}, {record[KEY]} was written: it changed on disk")


def of_type(kind: type[Value], value: object) -> Value:
    """Return `value` where JSON gave a `kind`; TypeError where it gave something else, such as true for a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value


def list_of(kind: type[Value], value: object) -> tuple[Value, ...]:
    """Return the items of a JSON list of `kind`; raises as `of_type`."""
    return tuple(of_type(kind, one) for one in of_type(list, value))
