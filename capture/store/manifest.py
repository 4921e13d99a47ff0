"""OUT/manifest.json: what a folder holds; everything in it can be made again from plan and shards."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...models.checked_record import list_of, of_type, require_checksum
from ...models.errors import RunError
from .diskio import read_file, write_atomically
from .errors import NewerFormatError, ShardError
from .header import MALFORMED
from .record import record_bytes
from .shard import Shard, open_and_close
from .version import FORMAT_VERSION, require_version

RESUMED = "Finish it by running it again."
NOT_RESUMED = "A generation cannot be resumed: run it again into an empty folder."
MANIFEST_FORMAT = "hiddentap"
_KEYS = ("format", "format_version", "identity", "plan", "shards", "counts", "complete")
_LATER_KEYS = ("rejects_crc32",)


@dataclass(frozen=True)
class ShardEntry:
    """One sealed shard: `file` below the output folder, its rows, samples and bytes."""

    file: str
    rows: int
    samples: int
    bytes: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "ShardEntry":
        """Return the inverse of `asdict`; ValueError, KeyError or TypeError for anything else."""
        file = of_type(str, entry["file"])
        if Path(file).parent.as_posix() != "shards":
            raise ValueError(f"{file!r} is no file of the folder shards")
        return cls(file, *(of_type(int, entry[name]) for name in ("rows", "samples", "bytes")))


@dataclass(frozen=True)
class Manifest:
    """The summary of an output folder.

    identity: what a later run must agree with. plan: `Plan.summary()`, of a generation what fixes its shards; empty where
    nothing was planned.
    counts: captured, rejected, rows, and the caller's. complete: every sample of the run is
    captured or rejected. rejects_crc32: of rejects.jsonl as eight hexadecimal digits, None where none was written.
    """

    identity: dict[str, Any]
    plan: dict[str, Any]
    shards: tuple[ShardEntry, ...]
    counts: dict[str, Any]
    complete: bool
    rejects_crc32: str | None = None

    @property
    def is_resumable(self) -> bool:
        """Return whether the command that made the folder resumes; a generation from Python, which has no plan, does not."""
        return self.identity.get("mode") != "generation" or bool(self.plan)

    @property
    def way_on(self) -> str:
        """What to do about an incomplete folder, in one sentence."""
        return RESUMED if self.is_resumable else NOT_RESUMED

    @classmethod
    def from_shards(
        cls,
        identity: Mapping[str, Any],
        plan: Mapping[str, Any],
        shards: Iterable[Shard],
        *,
        complete: bool,
        counts: Mapping[str, Any] | None = None,
        rejects_crc32: str | None = None,
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
        return cls(dict(identity), dict(plan), ordered, found | dict(counts or {}), complete, rejects_crc32)

    def write(self, path: Path) -> None:
        """Replace the file at `path`; readers see the old one or the new one."""
        record = {"format": MANIFEST_FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        write_atomically(path, record_bytes(record, "the manifest"))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """RunError where the file is missing, not a manifest or changed on disk; FileAccessError where it cannot be read now."""
        try:
            record = json.loads(read_file(path))
            if record["format"] != MANIFEST_FORMAT:
                raise ValueError(f"{record['format']!r}")
            require_version(path, record["format_version"], FORMAT_VERSION)
            require_checksum(record, _KEYS, _LATER_KEYS)
            identity, plan, counts = (of_type(dict, record[name]) for name in ("identity", "plan", "counts"))
            shards = tuple(ShardEntry.from_json(entry) for entry in list_of(dict, record["shards"]))
            rejects = record.get("rejects_crc32")
            return cls(
                identity, plan, shards, counts, of_type(bool, record["complete"]),
                None if rejects is None else of_type(str, rejects),
            )  # fmt: skip
        except (FileNotFoundError, NewerFormatError, *MALFORMED) as error:
            raise RunError(f"{path} is no manifest of this format (version {FORMAT_VERSION}): {error!r}.") from error

    def open_shards(self, folder: Path) -> list[Shard]:
        """Return the listed shards below `folder`, opened once and closed.

        Raises:
            ShardError: one that is missing, not whole, or another than is listed.
        """
        shards = [open_and_close(folder / entry.file) for entry in self.shards]
        for entry, shard in zip(self.shards, shards, strict=True):
            found = ShardEntry(entry.file, shard.R, shard.M, shard.nbytes)
            if found != entry:
                raise ShardError(f"{shard.path}: the manifest lists {entry}, found {found}; see `hiddentap verify`.")
        return shards

    def contradictions(self) -> list[str]:
        """Return the contradictions between its list of shards, its counts and its summary of the plan, as text."""
        samples, rows = (sum(getattr(entry, name) for entry in self.shards) for name in ("samples", "rows"))
        told = [("captured", self.counts.get("captured"), samples), ("rows", self.counts.get("rows"), rows)]
        if self.complete and self.plan:
            told.append(("shards", self.plan.get("shards"), len(self.shards)))
        return [f"it says {said} {what} and lists {listed}" for what, said, listed in told if said != listed]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the changes between two identities as "key: old -> new", nested keys joined by dots; [] if equal."""
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
