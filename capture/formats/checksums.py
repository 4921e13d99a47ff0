"""The checksums of an export's files, beside them: a trainer's files have no place for any.

The list is in the form of `sha256sum`, which can check it without this package.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..store.diskio import naming, write_atomically
from .containers import PARTIAL
from .errors import LayoutError

SUMS_FILE = "hiddentap-export.sha256"
_BLOCK = 16 << 20


def listed_sums(dest: Path) -> dict[str, str]:
    """Return the SHA-256 of each listed file, by its path below `dest`; {} where there is no list.

    Raises:
        LayoutError: a line that is none of such a list.
    """
    path = dest / SUMS_FILE
    if not path.is_file():
        return {}
    with naming(path, "read"):
        lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    found = {}
    for number, line in enumerate(lines, 1):
        value, _, name = line.partition("  ")
        if len(value) != 64 or set(value) - set("0123456789abcdef") or not name:
            raise LayoutError(f"{path}, line {number}: expected a SHA-256 and the name of a file, found {line[:80]!r}.")
        found[name] = value
    return found


def write_sums(dest: Path, sums: Mapping[str, str]) -> str:
    """Replace the list; returns its own SHA-256."""
    data = "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())).encode()
    write_atomically(dest / SUMS_FILE, data)
    return hashlib.sha256(data).hexdigest()


def sums_of(dest: Path, names: Collection[str], done: Callable[[], object]) -> dict[str, str]:
    """Return the SHA-256 of each of these files below `dest`, several read at once.

    done: called once for each file that was read.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = {}
        for name, value in zip(names, pool.map(lambda name: file_sum(dest / name), names), strict=True):
            found[name] = value
            done()
    return found


def file_sum(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with naming(path, "read"), path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def files_below(dest: Path, own: Collection[str]) -> Iterator[str]:
    """Yield the path of each file below `dest`, in order, without those in `own` and without unfinished ones."""
    for path in sorted(dest.rglob("*")):
        name = path.relative_to(dest).as_posix()
        if path.is_file() and name not in own and path.suffix not in (PARTIAL, ".tmp"):
            yield name
