"""The plan on disk: token ids, loss mask, length, id and origin of every sample, in input order."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.checked_record import KEY, list_of, of_type, require_checksum
from ..rejects import Reject
from .assignment import Assignment, PlannedShard
from .diskio import read_file
from .errors import PlanDamagedError, PlanError, ShardError
from .header import MALFORMED
from .plan_extra import PlanExtra
from .samples import ShardSamples, gather_ragged, ragged_index
from .tensorfile import TensorFile
from .version import PLAN_VERSION, require_version

PLAN_FILE = "plan.json"
MENDING = "Run the capture that made it again: it plans again from its data and keeps the shards that agree."
PLAN_KEYS = ("format_version", "identity", "sources", "shard_rows", "extra", "rejected", "files")
PLAN_TENSORS: Mapping[str, torch.dtype] = {
    "input_ids": torch.int32,
    "loss_mask": torch.uint8,
    "lengths": torch.int32,
    "sample_ids": torch.uint8,
    "sample_id_offsets": torch.int64,
    "source_index": torch.int32,
    "source_line": torch.int64,
    "truncated_from": torch.int32,
    "rejects": torch.uint8,
}

# Beside them where samples have images: which samples (N,), and for each, JSON of the caller's, end to end.
IMAGE_TENSORS: Mapping[str, torch.dtype] = {
    "image_samples": torch.int64,
    "images": torch.uint8,
    "image_offsets": torch.int64,
}


def plan_file(folder: Path, name: str) -> Path:
    """Return the file of one of the plan's tensors; `rejects` holds JSON lines as bytes."""
    return folder / f"{name}.safetensors"


class Plan:
    """A sealed plan folder, opened read-only; numbers of samples are mapped, tokens are read when asked for.

    Holds 8 bytes per sample in memory (where its tokens begin) once `shards` or a sample's tokens are used. Pickles as
    its path.

    Raises:
        PlanError: there is no sealed plan. PlanDamagedError naming what is missing, changed, cut or of another size than
            `plan.json` says. FileAccessError: a file cannot be opened or read now, whole or not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        summary = _read_summary(self.folder / PLAN_FILE)
        try:
            self.identity: dict[str, Any] = of_type(dict, summary["identity"])
            self.sources: tuple[str, ...] = list_of(str, summary["sources"])
            self.shard_rows = of_type(int, summary["shard_rows"])
            self.extra = PlanExtra.from_json(of_type(dict, summary["extra"]))
            self.rejected = of_type(int, summary["rejected"])
            self._sums = {name: of_type(int, file["crc32"]) for name, file in summary["files"].items()}
            self._files = {
                name: TensorFile(plan_file(self.folder, name), dtype, summary["files"][name]["entries"])
                for name, dtype in {**PLAN_TENSORS, **IMAGE_TENSORS}.items()
                if name in PLAN_TENSORS or name in summary["files"]
            }
            self.M: int = summary["files"]["lengths"]["entries"]
            self.R: int = summary["files"]["input_ids"]["entries"]
        except MALFORMED as error:
            raise PlanDamagedError(f"{self.folder / PLAN_FILE} cannot be read ({error!r}). {MENDING}") from error
        except ShardError as error:
            raise PlanDamagedError(f"the plan is damaged: {error} {MENDING}") from error
        self.crc32: str | None = summary.get(KEY)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Return (M,) int32: tokens of each sample."""
        return self._files["lengths"].mapped()

    @cached_property
    def truncated_from(self) -> NDArray[np.int32]:
        """Return (M,) int32: tokens before truncation, 0 where nothing was cut."""
        return self._files["truncated_from"].mapped()

    @cached_property
    def source_index(self) -> NDArray[np.int32]:
        """Return (M,) int32 into `sources`."""
        return self._files["source_index"].mapped()

    @cached_property
    def line(self) -> NDArray[np.int64]:
        """Return (M,) int64: line of the source, counted from 1."""
        return self._files["source_line"].mapped()

    @cached_property
    def image_samples(self) -> NDArray[np.int64]:
        """Return (N,) int64, ascending: the samples with images; N = 0 where the run has none."""
        file = self._files.get("image_samples")
        return np.empty(0, np.int64) if file is None else file.read(0, file.entries)

    @property
    def has_images(self) -> bool:
        return "image_samples" in self._files

    @cached_property
    def shards(self) -> Assignment:
        """Every planned shard, made when asked for."""
        shards = Assignment(self.lengths, self.shard_rows)
        if int(shards.row_offsets[-1]) != self.R:
            raise PlanDamagedError(
                f"{self.folder}: lengths add up to {shards.row_offsets[-1]} tokens, {self.R} are stored. {MENDING}"
            )
        return shards

    def input_ids(self, i: int) -> NDArray[np.int32]:
        """Return (S,) int32: the token ids of sample i."""
        return self._files["input_ids"].read(*self._token_range(i))

    def loss_mask(self, i: int) -> NDArray[np.uint8]:
        """Return (S,) uint8: 1 where the token itself is supervised."""
        return self._files["loss_mask"].read(*self._token_range(i))

    def images(self, i: int) -> dict[str, Any] | None:
        """Return what the caller keeps of the images of sample i, or None."""
        place = int(np.searchsorted(self.image_samples, i))
        if place == len(self.image_samples) or self.image_samples[place] != i:
            return None
        start, stop = self._files["image_offsets"].read(place, place + 2)
        return dict(json.loads(self._files["images"].read(int(start), int(stop)).tobytes()))

    def sample_id(self, i: int) -> str:
        """Return the id of sample i."""
        self._require(i)
        start, stop = self._files["sample_id_offsets"].read(i, i + 2)
        return self._files["sample_ids"].read(start, stop).tobytes().decode()

    def rejects(self) -> Iterator[Reject]:
        """Input rows that never became a sample, in input order."""
        file = self._files["rejects"]
        for line in file.read(0, file.entries).tobytes().splitlines():
            try:
                yield Reject.from_json(json.loads(line))
            except MALFORMED as error:
                raise PlanDamagedError(f"the plan is damaged: {file.path}: {error!r}. {MENDING}") from error

    def samples_of(self, shard: PlannedShard) -> ShardSamples:
        """Return the samples of a planned shard, in its order."""
        first, last = int(shard.sample_index.min()), int(shard.sample_index.max()) + 1
        inside = shard.sample_index - first
        offsets: NDArray[np.int64] = self._files["sample_id_offsets"].read(first, last + 1)
        raw: NDArray[np.uint8] = self._files["sample_ids"].read(int(offsets[0]), int(offsets[-1]))
        id_bytes, id_offsets = gather_ragged(raw, offsets - offsets[0], inside)
        return ShardSamples(
            shard.sample_index,
            id_bytes,
            id_offsets,
            np.asarray(self.source_index[first:last])[inside],
            np.asarray(self.line[first:last])[inside],
            self.sources,
        )

    def tokens_of(self, shard: PlannedShard) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids (R,) int32 and loss_mask (R,) uint8 of a planned shard, in the order of its rows."""
        first, last = int(shard.sample_index.min()), int(shard.sample_index.max()) + 1
        starts = self.shards.row_offsets[first : last + 1]
        begin, end = int(starts[0]), int(starts[-1])
        order = ragged_index(starts[shard.sample_index - first] - begin, shard.lengths)
        input_ids = self._files["input_ids"].read(begin, end)[order]
        loss_mask = self._files["loss_mask"].read(begin, end)[order]
        return torch.from_numpy(input_ids), torch.from_numpy(loss_mask)

    def is_text_of(self, shard: PlannedShard) -> torch.Tensor:
        """is_text (R,) uint8 of a planned shard in the order of its rows: 0 where a row holds an image feature."""
        is_text = torch.ones(shard.R, dtype=torch.uint8)
        for row_start, sample in zip(shard.row_offsets.tolist(), shard.sample_index.tolist(), strict=False):
            for start, stop in (self.images(sample) or {}).get("placeholders", ()):
                is_text[row_start + start : row_start + stop] = 0
        return is_text

    def summary(self) -> dict[str, Any]:
        """Counts for the manifest, and which plan it is."""
        return {
            "samples": self.M,
            "rows": self.R,
            "shards": len(self.shards),
            "shard_rows": self.shard_rows,
            "rejected": self.rejected,
            **({} if self.crc32 is None else {KEY: self.crc32}),
        }

    def check(self) -> list[str]:
        """Read every file and compare it with its checksum; one sentence per file that differs."""
        found = {name: file.crc32() for name, file in self._files.items()}
        return [
            f"{self._files[name].path}: checksum {value:08x}, {self._sums[name]:08x} was sealed"
            for name, value in found.items()
            if value != self._sums[name] and self._files[name].crc32() != self._sums[name]  # one reading may fail
        ]

    def require_whole(self) -> None:
        """Read every file; PlanDamagedError naming those that do not match their checksums."""
        damaged = self.check()
        if damaged:
            raise PlanDamagedError(f"the plan is damaged: {'; '.join(damaged)}. {MENDING}")

    def __reduce__(self) -> tuple[type["Plan"], tuple[Path]]:
        return Plan, (self.folder,)

    def _require(self, i: int) -> None:
        if not 0 <= i < self.M:
            raise IndexError(f"the plan has samples 0..{self.M - 1}, got {i}")

    def _token_range(self, i: int) -> tuple[int, int]:
        self._require(i)
        start, stop = self.shards.row_offsets[i : i + 2]
        return int(start), int(stop)


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(read_file(path))
        require_version(path, summary["format_version"], PLAN_VERSION)
        require_checksum(summary, PLAN_KEYS)
    except FileNotFoundError as error:
        raise PlanError(f"{path.parent} is no sealed plan: {path.name} is missing.") from error
    except MALFORMED as error:
        raise PlanDamagedError(f"{path} cannot be read ({error!r}). {MENDING}") from error
    return dict(summary)
