"""DEST: one export's folder, and what a second run on it must agree with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...models.errors import UsageError
from ..store import FolderLock, differences
from ..store.diskio import require_no_dangling_link, write_atomically
from .containers import write_whole
from .errors import LayoutError
from .job import ExportJob

EXPORT_FILE = "hiddentap-export.json"
SAMPLES_FILE = "hiddentap-samples.jsonl"
LOCK_FILE = ".hiddentap-lock"
EXPORT_VERSION = 1


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
        raise UsageError(f"{path} cannot be made ({error}); choose another folder.") from error
    with FolderLock(path / LOCK_FILE):
        write_record(path, identity, complete=False)
        yield


def write_record(path: Path, identity: Mapping[str, Any], *, complete: bool, **counts: object) -> None:
    """Replace the record of the export in `path`."""
    record = {"export_version": EXPORT_VERSION, "identity": dict(identity), "complete": complete, **counts}
    write_atomically(path / EXPORT_FILE, json.dumps(record, sort_keys=True, indent=1).encode() + b"\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """The record of an export in `path`; None where the folder is not one of ours."""
    file = path / EXPORT_FILE
    if not file.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
        if record["export_version"] != EXPORT_VERSION:
            raise ValueError(f"version {record['export_version']}")
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"{file} cannot be read ({error!r}); this release reads version {EXPORT_VERSION}.") from error
    return record


def write_samples(path: Path, job: ExportJob) -> None:
    """The list that says which sample each number is; layouts have no place for it."""

    def write(file: IO[bytes]) -> None:
        for number in range(len(job)):
            who = job.who(number)
            line = {"number": number, "id": who.sample_id, "source": who.source, "line": who.line}
            file.write(json.dumps(line).encode() + b"\n")

    write_whole(path / SAMPLES_FILE, write)


def require_ours(path: Path, identity: Mapping[str, Any]) -> None:
    """See that `path` is free or holds the export that `identity` asks for; raises UsageError."""
    require_no_dangling_link(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; give a folder for the export.")
    record = read_record(path)
    if record is None:
        if path.is_dir() and any(entry.name != LOCK_FILE for entry in path.iterdir()):
            raise UsageError(f"{path} is not empty and holds no export of ours; choose an empty or a new folder.")
        return
    changed = differences(record["identity"], identity)
    if changed:
        raise UsageError(
            f"{path} holds another export; choose another folder, or ask for the same again. What differs (there -> now):\n  "
            + "\n  ".join(changed)
        )
