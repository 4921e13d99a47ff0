"""OUT/answers: what was written for every input row, in sealed pieces of consecutive rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...models.errors import RunError, UsageError
from ..identity import identity_differences, require_none
from ..rejects import Reject
from ..store import FileAccessError, Manifest
from ..store.diskio import write_atomically
from ..store.folder import MANIFEST_FILE
from .written import WrittenSample

MESSAGES_FILE = "messages.jsonl"


@dataclass(frozen=True)
class AnswerFolder:
    """The places of a folder of answers; nothing is touched until a method says so."""

    path: Path

    def piece(self, index: int) -> Path:
        """Return the path at which the piece of that index is sealed."""
        return self.path / f"answers-{index:06d}.jsonl"

    def manifest(self) -> Manifest | None:
        """Return what the run that began here wrote; None where none did.

        Raises:
            UsageError: something else is here.
        """
        try:
            return Manifest.read(self.path / MANIFEST_FILE)
        except FileAccessError:
            raise
        except RunError as error:
            if self.path.is_dir() and any(self.path.glob("*.jsonl")):
                raise UsageError(f"{self.path} holds files and no readable manifest; choose another folder.") from error
            return None

    def earlier(self, identity: Mapping[str, Any]) -> Manifest | None:
        """Return the manifest of the run that began here, if one did.

        Raises:
            UsageError: it asked for something else than `identity`; lists what differs.
        """
        manifest = self.manifest()
        if manifest is not None:
            require_none(identity_differences(manifest.identity, identity), self.path)
        return manifest

    def begin(self, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> Manifest:
        """Write the manifest of a new run; `facts` are what a later run takes over."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self._write(identity, facts, complete=False)

    def seal(self, index: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write a piece: it is there whole, or not at all."""
        write_atomically(
            self.piece(index), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        )

    def finish(self, manifest: Manifest, pieces: int, counts: Mapping[str, Any]) -> Manifest:
        """Say that every piece is there, and write the conversations once more by themselves, for other tools."""
        keys = ("id", "messages", "tools", "text")
        with (self.path / f"{MESSAGES_FILE}.tmp").open("w", encoding="utf-8") as file:
            for line in self.lines(pieces):
                told = {key: line[key] for key in keys if line.get(key) is not None}
                if "messages" in told or "text" in told:
                    file.write(json.dumps(told, ensure_ascii=False) + "\n")
        (self.path / f"{MESSAGES_FILE}.tmp").replace(self.path / MESSAGES_FILE)
        return self._write(manifest.identity, {**manifest.plan, "pieces": pieces}, complete=True, counts=counts)

    def lines(self, pieces: int) -> Iterator[dict[str, Any]]:
        """Yield the lines of every piece, in the order of the input rows.

        Raises:
            RunError: a piece that is missing or cannot be read.
        """
        for index in range(pieces):
            path = self.piece(index)
            try:
                for line in path.read_bytes().splitlines():
                    yield json.loads(line)
            except (OSError, ValueError) as error:
                raise RunError(
                    f"{path} cannot be read ({error}); remove {self.path / MANIFEST_FILE} and this file, and run again."
                ) from error

    def _write(self, identity: Mapping[str, Any], facts: Mapping[str, Any], **more: Any) -> Manifest:
        manifest = Manifest.from_shards(identity, facts, [], **more)
        manifest.write(self.path / MANIFEST_FILE)
        return manifest


def line_of_sample(sample_id: str, source: str, line: int, sample: WrittenSample) -> dict[str, Any]:
    """Return one line of a piece: a sample."""
    values = {name: value for name, value in asdict(sample).items() if value is not None}
    return {"id": sample_id, "source": source, "line": line, **values}


def line_of_reject(reject: Reject) -> dict[str, Any]:
    """Return one line of a piece: a record that has no answers."""
    return {"source": reject.source, "line": reject.line, "id": reject.sample_id, "rejected": reject.as_json()}


def turns_of(lines: Iterable[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the turns of all samples among `lines`."""
    return [turn for line in lines for turn in line.get("turns", ())]
