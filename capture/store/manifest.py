"""OUT/manifest.json: what a folder holds; everything in it can be made again from plan and shards."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...models.errors import RunError
from .columns import FORMAT_VERSION
from .diskio import write_atomically
from .record import sorted_json
from .shard import Shard

MANIFEST_FORMAT = "hiddentap"


@dataclass(frozen=True)
class ShardEntry:
    """One sealed shard: `file` below the output folder, its rows, samples and bytes."""

    file: str
    rows: int
    samples: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The summary of an output folder.

    identity: what a later run must agree with. plan: `Plan.summary()`, empty where there was no plan.
    counts: captured, rejected, rows, and the caller's. complete: every sample of the run is
    captured or rejected.
    """

    identity: dict[str, Any]
    plan: dict[str, Any]
    shards: tuple[ShardEntry, ...]
    counts: dict[str, Any]
    complete: bool

    @classmethod
    def from_shards(
        cls,
        identity: Mapping[str, Any],
        plan: Mapping[str, Any],
        shards: Iterable[Shard],
        *,
        complete: bool,
        counts: Mapping[str, Any] | None = None,
    ) -> "Manifest":
        """Counts and list from what sealed shards say; `counts` adds to these or replaces them."""
        entries: list[ShardEntry] = []
        rejected = 0
        for shard in shards:
            entries.append(ShardEntry(f"shards/{shard.path.name}", shard.R, shard.M, shard.nbytes))
            rejected += len(shard.rejects)
        found = {
            "captured": sum(entry.samples for entry in entries),
            "rows": sum(entry.rows for entry in entries),
            "rejected": rejected,
        }
        ordered = tuple(sorted(entries, key=lambda entry: entry.file))
        return cls(dict(identity), dict(plan), ordered, found | dict(counts or {}), complete)

    def write(self, path: Path) -> None:
        """Replace the file at `path`; readers see the old one or the new one."""
        record = {"format": MANIFEST_FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        text = json.dumps(json.loads(sorted_json(record, "the manifest")), indent=1)
        write_atomically(path, text.encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """RunError where the file is missing or not a manifest."""
        try:
            record = json.loads(path.read_bytes())
            shards = tuple(ShardEntry(**entry) for entry in record["shards"])
            if record["format"] != MANIFEST_FORMAT or record["format_version"] != FORMAT_VERSION:
                raise ValueError(f"{record['format']} version {record['format_version']}")
            return cls(record["identity"], record["plan"], shards, record["counts"], record["complete"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is no manifest of this format (version {FORMAT_VERSION}): {error!r}.") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two identities, as "key: old -> new", nested keys joined by dots; [] if equal."""
    flat_old, flat_new = _flat(old), _flat(new)
    return [
        f"{key}: {_shown(flat_old, key)} -> {_shown(flat_new, key)}"
        for key in sorted(flat_old.keys() | flat_new.keys())
        if _shown(flat_old, key) != _shown(flat_new, key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat.update(_flat(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    # Compared as JSON, since one side has been through it: a tuple there is a list, and 1 is not true.
    return json.dumps(flat[key], ensure_ascii=False, sort_keys=True) if key in flat else "absent"
