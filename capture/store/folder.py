"""OUT: which file lies where, who may write, what a killed run left."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...models.checked_record import data_checksum
from ...models.errors import RunError, UsageError
from ..rejects import Reject
from .assignment import shard_index, shard_name
from .diskio import (
    naming,
    read_file,
    remove_abandoned,
    require_folder,
    require_room_for_folder,
    system_words,
    write_atomically,
)
from .errors import FileAccessError, NewerFormatError, ShardError
from .header import MALFORMED
from .lock import FolderLock
from .manifest import Manifest
from .plan import PLAN_FILE
from .plan_writer import plan_leftovers
from .record import sorted_json
from .shard import Shard, open_and_close

LOCK_FILE = ".hiddentap-lock"
MANIFEST_FILE = "manifest.json"
REJECTS_FILE = "rejects.jsonl"
ANSWERS = "answers"
_UNSEALED = re.compile(r"shard-\d{6,}\.safetensors\.(open|rewrite|[a-z][a-z0-9_]*\.spool)")


@dataclass(frozen=True)
class SealedShards:
    """Files under the names of sealed shards, by index: whole ones, and broken ones."""

    shards: dict[int, Shard]
    broken: dict[int, ShardError]


@dataclass(frozen=True)
class OutputFolder:
    """The places of an output folder; nothing is touched until a method says so."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan"

    @property
    def has_plan(self) -> bool:
        """Return whether a plan was sealed here; nothing is opened."""
        return (self.plan / PLAN_FILE).exists()

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    @property
    def head(self) -> Path:
        return self.path / "head"

    @property
    def answers(self) -> Path:
        """Return the folder that a regeneration writes its answers into."""
        return self.path / ANSWERS

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST_FILE

    @property
    def rejects_path(self) -> Path:
        return self.path / REJECTS_FILE

    def shard_path(self, index: int) -> Path:
        """Return the path of sealed shard `index`."""
        return self.shards / shard_name(index)

    @contextmanager
    def lock(self) -> Iterator[FolderLock]:
        """Be the one writer, or the first of a run's: creates the folder and `shards/` where missing.

        Raises UsageError for a file, a non-empty folder that is not ours or one that cannot be written,
        FolderLockedError if another process writes here.
        """
        self._require_ours()
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(FolderLock(self.path / LOCK_FILE))
                self.shards.mkdir(exist_ok=True)
            except (OSError, FileAccessError) as error:
                raise UsageError(
                    f"{self.path} cannot be written or locked ({system_words(error)}); choose another folder."
                ) from error
            yield lock

    def require_capture(self) -> None:
        """Raise UsageError where no capture can be: no folder, or one with neither a manifest nor shards."""
        require_folder(self.path, "the folder of a capture")
        if not (self.manifest_path.exists() or self.shards.is_dir()):
            raise UsageError(f"{self.path} holds no captured shards; expected the folder that a capture filled.")

    def require_usable(self) -> None:
        """Raise what `lock` would raise; a folder that is not there is not made."""
        self._require_ours()
        if (self.path / LOCK_FILE).exists():
            with self.lock():
                return
        place = self.path.absolute()
        there = next(one for one in (place, *place.parents) if one.exists())
        try:
            Path(tempfile.mkdtemp(prefix=".hiddentap-", dir=there)).rmdir()
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written or locked ({system_words(error)}); choose another folder."
            ) from error

    @contextmanager
    def join(self, claim: str) -> Iterator[None]:
        """Write beside the process that shared its lock of that `claim`.

        Raises RunError where that process's folder is not seen from here, FolderLockedError if it is another run's by now.
        """
        if not (self.path / LOCK_FILE).exists():
            raise RunError(
                f"{self.path} is not the folder that the first process of this run made; expected all of them to see one "
                "folder on a shared file system."
            )
        with FolderLock(self.path / LOCK_FILE, joining=claim):
            yield

    def stray_files(self) -> list[Path]:
        """Return the leftovers of a killed run: unsealed shards, spools, temporary files, a plan without `plan.json`."""
        shards = self.shards.iterdir() if self.shards.is_dir() else ()
        found = [path for path in shards if _UNSEALED.fullmatch(path.name)]
        found += [self.path / f"{name}.tmp" for name in (MANIFEST_FILE, REJECTS_FILE)]
        sealed_plan = (self.plan / PLAN_FILE).exists()
        found += [path for path in plan_leftovers(self.plan) if not sealed_plan or path.suffix != ".safetensors"]
        return sorted(path for path in found if path.is_file())

    def remove_stray_files(self) -> list[Path]:
        """Remove them; call it under `lock`. Returns what was removed; files of other names stay."""
        strays = self.stray_files()
        for path in strays:
            path.unlink()
        return strays

    def remove_unsealed(self, index: int) -> None:
        """Remove what a killed process left of shard `index`; RunError where one still writes it."""
        name = shard_name(index)
        for path in self.stray_files():
            if path.name.startswith(f"{name}."):
                remove_abandoned(path)

    def remove_shard(self, index: int) -> None:
        """Remove what has the name of sealed shard `index`, a file or not."""
        path = self.shard_path(index)
        with naming(path, "removed"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def sealed_shards(self) -> SealedShards:
        """Check every file that has the name of a sealed shard; the shards come closed and open themselves to read.

        Raises:
            NewerFormatError, FileAccessError: a file of which nothing can be said; it may be whole.
        """
        result = SealedShards({}, {})
        for path in sorted(self.shards.iterdir()) if self.shards.is_dir() else ():
            index = shard_index(path.name)
            if index is None:
                continue
            try:
                result.shards[index] = _read_twice(path)
            except NewerFormatError:
                raise
            except ShardError as error:
                # One that was raised keeps the frames of all who asked, and so the files that they had open.
                result.broken[index] = ShardError(str(error))
        return result

    def sealed_names(self) -> int:
        """Return how many files have the name of a sealed shard; none is opened."""
        return sum(shard_index(path.name) is not None for path in self.shards.iterdir()) if self.shards.is_dir() else 0

    def write_rejects(self, rejects: Iterable[Reject]) -> str:
        """Replace rejects.jsonl by these, ordered by source and line; returns the file's checksum for the manifest.

        Given the plan's and every sealed shard's, the file is the same whatever was killed or resumed before.
        """
        data = rejects_bytes(rejects)
        write_atomically(self.rejects_path, data)
        return data_checksum(data)

    def read_rejects(self) -> list[Reject]:
        """Return the lines of rejects.jsonl; [] where there is no such file. RunError where it is damaged."""
        try:
            lines = read_file(self.rejects_path).splitlines()
        except FileNotFoundError:
            return []
        try:
            return [Reject.from_json(json.loads(line)) for line in lines]
        except MALFORMED as error:
            raise RunError(f"{self.rejects_path} is damaged ({error!r}); the same capture writes it again.") from error

    def _require_ours(self) -> None:
        require_room_for_folder(self.path)
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give a folder for the output.")
        if (self.path / LOCK_FILE).exists() or not any(self.path.iterdir()):
            return
        try:
            Manifest.read(self.manifest_path)
        except RunError as error:
            raise UsageError(
                f"{self.path} is not empty and was not made by hiddentap; choose an empty or a new folder."
            ) from error


def rejects_bytes(rejects: Iterable[Reject]) -> bytes:
    """Return the bytes of rejects.jsonl for these rejects, ordered by source and line."""
    ordered = sorted(rejects, key=lambda reject: (reject.source, reject.line))
    return "".join(sorted_json(reject.as_json(), "a reject") + "\n" for reject in ordered).encode()


def _read_twice(path: Path) -> Shard:
    """Return the shard at `path`; judge it damaged only if two readings agree, since one may fail."""
    try:
        return open_and_close(path)
    except NewerFormatError:
        raise
    except ShardError:
        return open_and_close(path)
