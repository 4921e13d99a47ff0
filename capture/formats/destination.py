"""DEST: one export's folder, and what a second run on it must agree with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...models.checked_record import of_type, require_checksum, with_checksum
from ...models.errors import UsageError
from ..store import FolderLock, differences
from ..store.diskio import require_room_for_folder, system_words, write_atomically
from .checksums import SUMS_FILE
from .containers import write_whole
from .errors import LayoutError
from .job import ExportJob

EXPORT_FILE = "hiddentap-export.json"
SAMPLES_FILE = "hiddentap-samples.jsonl"
LOCK_FILE = ".hiddentap-lock"
EXPORT_VERSION = 1
# What lies beside a trainer's files and is not listed among them.
OWN_FILES = (EXPORT_FILE, SUMS_FILE, LOCK_FILE)
_COUNTS = ("samples", "left_out", "truncated", "sums_sha256")


@contextmanager
def destination(path: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Be the one that fills `path`, and see that an earlier run there was of the same request.

    Raises:
        UsageError: a file, a folder with other things in it, or one of another export.
        FolderLockedError: another process is at it.
    """
    require_ours(path, identity)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be made ({system_words(error)}); choose another folder.") from error
    with FolderLock(path / LOCK_FILE):
        write_record(path, identity, complete=False)
        yield


def write_record(path: Path, identity: Mapping[str, Any], *, complete: bool, **counts: object) -> None:
    """Replace the record of the export in `path`."""
    record = {"export_version": EXPORT_VERSION, "identity": dict(identity), "complete": complete, **counts}
    data = json.dumps(with_checksum(record), sort_keys=True, indent=1).encode() + b"\n"
    write_atomically(path / EXPORT_FILE, data)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of an export in `path`; None where the folder is not one of ours."""
    file = path / EXPORT_FILE
    if not file.is_file():
        return None
    try:
        record = of_type(dict, json.loads(file.read_bytes()))
        if record["export_version"] != EXPORT_VERSION:
            raise ValueError(f"version {record['export_version']}")
        require_checksum(record, ("export_version", "identity", "complete"), _COUNTS)
        of_type(dict, record["identity"])
        of_type(bool, record["complete"])
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"{file} cannot be read ({error!r}); this release reads version {EXPORT_VERSION}.") from error
    return record


def write_samples(path: Path, job: ExportJob) -> None:
    """Write the list that maps numbers to samples; layouts have no place for it."""

    def write(file: IO[bytes]) -> None:
        for number in range(len(job)):
            who = job.who(number)
            line = {"number": number, "id": who.sample_id, "source": who.source, "line": who.line}
            file.write(json.dumps(line).encode() + b"\n")

    write_whole(path / SAMPLES_FILE, write)


def require_ours(path: Path, identity: Mapping[str, Any]) -> None:
    """See that `path` is free or holds the export that `identity` asks for; raises UsageError."""
    require_room_for_folder(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; give a folder for the export.")
    record = read_record(path)
    if record is None:
        # What a run leaves that was killed before its first record was whole.
        ours = (LOCK_FILE, f"{EXPORT_FILE}.tmp")
        if path.is_dir() and any(entry.name not in ours for entry in path.iterdir()):
            raise UsageError(f"{path} is not empty and holds no export of ours; choose an empty or a new folder.")
        return
    changed = differences(record["identity"], identity)
    if changed:
        raise UsageError(
            f"{path} holds another export; choose another folder, or ask for the same again. What differs (there -> now):\n  "
            + "\n  ".join(changed)
        )
