"""The seal record: everything a shard says beside its tensors, as sorted JSON under one metadata key."""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...models.checked_record import with_checksum
from ...models.errors import UsageError
from ..rejects import Reject
from .version import FORMAT_VERSION

_NO_CHECKSUM = "00000000"
# Inside the header the JSON is a string, so its quotes are escaped. Keys are sorted and the ones before this hold only
# identifiers and hexadecimal digits: the first match is ours whatever the caller's metadata says.
_HEADER_CHECKSUM = re.compile(rb'\\"header_crc32\\":\\"([0-9a-f]{8})\\"')


@dataclass(frozen=True)
class SealRecord:
    """The record under the metadata key.

    metadata: the caller's, JSON values.
    columns: axis by column name; sorted, they are the columns of the `checksums` tensor.
    sources: names by source index.
    rejects: samples of this shard that were taken out during the forward.
    checksums: CRC-32 by tensor, of the tensors that are not checksummed per sample.
    header_crc32: CRC-32 of the header with this value as eight zeros.
    """

    metadata: Mapping[str, Any]
    columns: Mapping[str, str]
    sources: tuple[str, ...] = ()
    rejects: tuple[Reject, ...] = ()
    checksums: Mapping[str, int] | None = None
    header_crc32: int = 0

    def with_checksums(self, checksums: Mapping[str, int], header_crc32: int = 0) -> "SealRecord":
        """Return the same record with the numbers known at the seal; its text keeps its length."""
        return replace(self, checksums=dict(checksums), header_crc32=header_crc32)

    def text(self, reserved: tuple[str, ...] = ()) -> str:
        """Sorted JSON; checksums are eight digits each, so reserving them and filling them takes the same room.

        reserved: names of the tensors whose checksums are still to come.
        """
        known = self.checksums if self.checksums is not None else dict.fromkeys(reserved, 0)
        record = {
            "checksums": {name: f"{value:08x}" for name, value in known.items()},
            "columns": dict(self.columns),
            "format_version": FORMAT_VERSION,
            "header_crc32": f"{self.header_crc32:08x}",
            "metadata": dict(self.metadata),
            "rejected": [reject.as_json() for reject in self.rejects],
            "sources": list(self.sources),
        }
        return sorted_json(record, "the shard's metadata")

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> "SealRecord":
        """Return the inverse of `text`, read as JSON; ValueError, KeyError, TypeError or AttributeError where it is not one."""
        metadata, columns, sources = record["metadata"], record["columns"], record["sources"]
        if not isinstance(metadata, dict) or not isinstance(columns, dict):
            raise TypeError("metadata and columns must be objects")
        if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
            raise TypeError("sources must be a list of names")
        return cls(
            metadata,
            columns,
            tuple(sources),
            tuple(Reject.from_json(reject) for reject in record["rejected"]),
            {name: int(value, 16) for name, value in record["checksums"].items()},
            int(record["header_crc32"], 16),
        )


def header_checksum(raw: bytes) -> int:
    """CRC-32 of a header in which the place of this very number counts as eight zeros."""
    found = _HEADER_CHECKSUM.search(raw)
    if found is None:
        raise ValueError("the header holds no checksum of itself")
    start, stop = found.span(1)
    return zlib.crc32(raw[:start] + _NO_CHECKSUM.encode() + raw[stop:])


def record_bytes(record: Mapping[str, Any], what: str) -> bytes:
    """Return a file's bytes for a record with its own checksum; UsageError naming `what` where a value is no JSON."""
    sorted_json(record, what)
    return json.dumps(with_checksum(record), sort_keys=True, indent=1).encode() + b"\n"


def sorted_json(value: object, what: str) -> str:
    """Compact JSON with sorted keys; UsageError naming `what` where the value is no JSON (NaN included)."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} must be JSON values with text keys and without NaN: {error}.") from error
