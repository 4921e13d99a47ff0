"""The shards of a generation over known prompts: fixed before the first token, filled one after the other, resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...models.errors import RunError, UsageError
from ..identity import identity_differences, require_none
from ..store import (
    FINISH,
    FINISH_REASONS,
    RESUMED,
    DiskFullError,
    FileAccessError,
    Manifest,
    OutputFolder,
    PlannedShard,
    Reject,
    Shard,
)
from ..store.folder import LOCK_FILE, MANIFEST_FILE
from .generation.request import GenerationRequest
from .shard_sink import RequestWriter


def earlier_generation(path: Path) -> Manifest | None:
    """Return the manifest of the generation that was begun in the folder `path`; None for an empty or new folder.

    Raises:
        UsageError: the folder holds something else.
        FileAccessError: the manifest cannot be read now.
    """
    if was_just_begun(path, f"{MANIFEST_FILE}.tmp"):
        return None
    try:
        manifest = Manifest.read(OutputFolder(path).manifest_path)
    except FileAccessError:
        raise
    except RunError:
        manifest = None
    if manifest is None or manifest.identity.get("mode") != "generation" or not manifest.plan:
        raise holds_something_else(path)
    return manifest


def was_just_begun(path: Path, *names: str) -> bool:
    """Return whether the folder `path` has nothing but what a run leaves that is killed as it begins, and `names`."""
    folder = OutputFolder(path)
    begun = {LOCK_FILE, folder.shards.name, *names}
    return not path.is_dir() or ({one.name for one in path.iterdir()} <= begun and not folder.sealed_names())


def holds_something_else(path: Path) -> UsageError:
    """Return the error that refuses `path` for a generation."""
    return UsageError(
        f"{path} is not empty; a generation needs an empty or a new folder, or one that the same command began."
    )


def require_same_generation(earlier: Manifest | None, identity: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError listing what differs between the generation that was begun in the folder `path` and this one."""
    if earlier is not None:
        require_none(identity_differences(earlier.identity, identity), path)


@dataclass(frozen=True)
class PromptShards:
    """The folder of a generation whose prompts are known.

    Each shard has consecutive prompts that run together, from an empty cache to the last one's end. What shares a forward, and
    with it every bit, therefore depends on no other shard: a shard can be made again, or later, and is the same.

    Attributes:
        planned: the prompts of every shard; each `lengths` is the most rows that the sample can have.
        facts: JSON values of the manifest's plan: what a later run on this folder takes over.
        writer: makes shards of requests.
    """

    folder: OutputFolder
    planned: Sequence[PlannedShard]
    identity: Mapping[str, Any]
    facts: Mapping[str, Any]
    writer: RequestWriter
    done: dict[int, Shard] = field(default_factory=dict)

    def resume(self, note: Callable[[str], None]) -> list[PlannedShard]:
        """Find the shards that are sealed, remove what a killed run left, and return the shards still to make.

        Raises:
            UsageError: a shard is of another run; nothing is removed then.
        """
        sealed = self.folder.sealed_shards()
        for index, shard in sealed.shards.items():
            require_none(identity_differences(shard.metadata, self.identity), self.folder.path)
            if not self._is_planned(index, shard):
                raise UsageError(
                    f"{shard.path} holds other samples than this run has for it; remove it, or choose another folder."
                )
        self.done.update(sealed.shards)
        self.folder.remove_stray_files()
        if len(self.done) < len(self.planned):
            self._manifest(complete=False)
        for index, error in sorted(sealed.broken.items()):
            note(f"{self.folder.shard_path(index).name} is not whole and is made again: {error}")
            self.folder.remove_shard(index)
        return [shard for shard in self.planned if shard.index not in self.done]

    @contextmanager
    def filling(
        self, planned: PlannedShard, requests: Sequence[GenerationRequest]
    ) -> Iterator[Callable[[GenerationRequest], int]]:
        """Yield what stores a request that has ended, and returns its bytes; seal the shard behind the block.

        requests: those of the shard, in its order.

        Raises:
            DiskFullError, FileAccessError: the shard cannot be written; says that the run resumes.
        """
        path = self.folder.shard_path(planned.index)
        try:
            with self.writer.open(path) as shard:
                places = {request.index: self.writer.begin(shard, request) for request in requests}
                yield partial(self._store, shard, places)
                self.done[planned.index] = shard.seal()
                self.done[planned.index].close()
        except (DiskFullError, FileAccessError) as error:
            raise type(error)(f"{error.what} {RESUMED}") from error

    def finish(self, rejects: Sequence[Reject]) -> tuple[dict[str, Any], Endings]:
        """Write rejects.jsonl and the manifest of a complete folder; return its counts and how the requests ended.

        rejects: input rows that never became requests.
        """
        endings = Endings.of(self.shards)
        found = [*rejects, *(reject for shard in self.shards for reject in shard.rejects)]
        checksum = self.folder.write_rejects(found)
        counts = {"rejected": len(found), "finish_reasons": dict(endings.reasons)}
        return self._manifest(complete=True, counts=counts, rejects_crc32=checksum).counts, endings

    @property
    def shards(self) -> list[Shard]:
        """Return the sealed shards, in order."""
        return [shard for _, shard in sorted(self.done.items())]

    def _store(self, shard: Any, places: Mapping[int, int], request: GenerationRequest) -> int:
        return self.writer.store(shard, places[request.index], request)

    def _manifest(self, *, complete: bool, **more: Any) -> Manifest:
        facts = {**self.facts, "shards": len(self.planned)}
        manifest = Manifest.from_shards(self.identity, facts, self.shards, complete=complete, **more)
        manifest.write(self.folder.manifest_path)
        return manifest

    def _is_planned(self, index: int, shard: Shard) -> bool:
        if index >= len(self.planned):
            return False
        found = [*shard.sample_index.tolist(), *(reject.sample_index for reject in shard.rejects)]
        return sorted(found) == sorted(self.planned[index].sample_index.tolist())


@dataclass(frozen=True)
class Endings:
    """Finish reasons of the requests of sealed shards.

    Attributes:
        reasons: counted, those of rejected requests too.
        new_tokens: tokens that the model wrote, of the samples in the shards.
    """

    reasons: Counter[str]
    new_tokens: int

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Endings:
        """Read them from the columns of `shards`."""
        reasons, new_tokens = Counter[str](), 0
        for shard in shards:
            reasons.update(reject.code for reject in shard.rejects)
            with shard:
                if shard.R:
                    ends = shard.rows(FINISH, 0, shard.R)[shard.row_offsets[1:] - 1]
                    reasons.update(FINISH_REASONS[end] for end in ends.tolist())
                    new_tokens += int((shard.rows("output_ids", 0, shard.R) >= 0).sum())
        return cls(reasons, new_tokens)
