"""OUT: which file lies where, who may write, what a killed run left."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...models.errors import RunError, UsageError
from .assignment import shard_index, shard_name
from .diskio import remove_abandoned, require_no_dangling_link, write_atomically
from .errors import ShardError
from .lock import FolderLock
from .manifest import Manifest
from .plan import PLAN_FILE
from .plan_writer import plan_leftovers
from .record import sorted_json
from .rejects import Reject
from .shard import Shard, open_and_close

LOCK_FILE = ".hiddentap-lock"
MANIFEST_FILE = "manifest.json"
REJECTS_FILE = "rejects.jsonl"
_UNSEALED = re.compile(r"shard-\d{6,}\.safetensors\.(open|rewrite|[a-z][a-z0-9_]*\.spool)")


@dataclass(frozen=True)
class SealedShards:
    """What lies under the names of sealed shards: whole ones, and those that are not, by index."""

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
    def shards(self) -> Path:
        return self.path / "shards"

    @property
    def head(self) -> Path:
        return self.path / "head"

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST_FILE

    @property
    def rejects_path(self) -> Path:
        return self.path / REJECTS_FILE

    def shard_path(self, index: int) -> Path:
        """Where shard `index` is sealed."""
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
            except OSError as error:
                raise UsageError(
                    f"{self.path} cannot be written or locked ({error}); choose another folder."
                ) from error
            yield lock

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
        """What a killed run left: unsealed shards, spools, temporary files, a plan without its `plan.json`."""
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

    def sealed_shards(self) -> SealedShards:
        """Check every file that has the name of a sealed shard; the shards come closed and open themselves to read."""
        result = SealedShards({}, {})
        for path in sorted(self.shards.iterdir()) if self.shards.is_dir() else ():
            index = shard_index(path.name)
            if index is None:
                continue
            try:
                result.shards[index] = open_and_close(path)
            except ShardError as error:
                result.broken[index] = error
        return result

    def sealed_names(self) -> int:
        """How many files have the name of a sealed shard; none is opened."""
        return sum(shard_index(path.name) is not None for path in self.shards.iterdir()) if self.shards.is_dir() else 0

    def write_rejects(self, rejects: Iterable[Reject]) -> int:
        """Replace rejects.jsonl by these, ordered by source and line; returns how many.

        Given the plan's and every sealed shard's, the file is the same whatever was killed or resumed before.
        """
        ordered = sorted(rejects, key=lambda reject: (reject.source, reject.line))
        lines = [sorted_json(reject.as_json(), "a reject") + "\n" for reject in ordered]
        write_atomically(self.rejects_path, "".join(lines).encode())
        return len(lines)

    def read_rejects(self) -> list[Reject]:
        """The lines of rejects.jsonl; [] where there is no such file."""
        if not self.rejects_path.exists():
            return []
        return [Reject.from_json(json.loads(line)) for line in self.rejects_path.read_bytes().splitlines()]

    def _require_ours(self) -> None:
        require_no_dangling_link(self.path)
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
