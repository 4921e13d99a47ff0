"""Input sources: which reader a name gets, and the rows of all of them in order."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....models.errors import UsageError
from ..errors import NoSourceError
from .items import RawRecord
from .json_files import json_document, json_lines
from .tables import dataset_folder_records, hub_records, parquet_records

_FILE_READERS: dict[str, Callable[[str, Path], Iterator[RawRecord]]] = {
    ".jsonl": json_lines,
    ".jsonl.gz": json_lines,
    ".json": json_document,
    ".parquet": parquet_records,
}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?")


def read_records(sources: Sequence[str]) -> Iterator[RawRecord]:
    """Yield the rows of all sources in order, streamed; a blank line is not a row.

    A source is a `.jsonl`, `.jsonl.gz`, `.json` or `.parquet` file, a folder written by `Dataset.save_to_disk`, or a
    hub dataset as `owner/name` or `owner/name:split` (split `train` if none is given).
    Every name is checked before this returns. Raises UsageError for a name of no known kind, NoSourceError for a missing
    file or a folder in its place; reading raises SourceError where a source turns out damaged.
    """
    if isinstance(sources, str):
        raise UsageError(f"expected a list of sources; found one string {sources!r}; write [{sources!r}]")
    readers = [_reader(source) for source in sources]
    return (row for reader in readers for row in reader())


def _reader(source: str) -> Callable[[], Iterator[RawRecord]]:
    if not source.isascii() and source.encode("utf-8", "replace").decode("utf-8") != source:
        raise UsageError(f"expected a source name that is valid UTF-8; found {source!r}; rename the file")
    path = Path(source)
    if path.is_dir():
        return _folder_reader(source, path)
    suffix = next((suffix for suffix in _FILE_READERS if path.name.endswith(suffix)), None)
    if suffix is None:
        return _hub_reader(source, path)
    if not path.exists():
        raise NoSourceError(f"expected the file {source}; found nothing there; check the path")
    if not path.is_file():
        raise NoSourceError(
            f"expected {source} to be a regular file; found a device or a pipe; write its rows to a file"
        )
    return partial(_FILE_READERS[suffix], source, path)


def _folder_reader(source: str, path: Path) -> Callable[[], Iterator[RawRecord]]:
    if not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        raise NoSourceError(
            f"expected a file at {source}; found a folder that save_to_disk did not write; name the files inside it"
        )
    return partial(dataset_folder_records, source, path)


def _hub_reader(source: str, path: Path) -> Callable[[], Iterator[RawRecord]]:
    if path.exists():
        raise UsageError(f"expected a file named {', '.join(_FILE_READERS)}; found {source}; rename it")
    match = _HUB_NAME.fullmatch(source)
    if match is None:
        raise NoSourceError(f"expected a file, a dataset folder or a hub name owner/name; found nothing at {source!r}")
    return partial(hub_records, source, match["name"], match["split"] or "train")


def source_identity(source: str) -> dict[str, Any]:
    """Size and sha256 of a file; of anything else, which is fetched by its name, the name."""
    path = Path(source)
    if not path.is_file():
        return {"name": source}
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
