"""DeepSpec's target cache, version 2: raw shards, a table of where each sample lies, a manifest."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.checked_record import list_of, of_type
from ..store.diskio import tensor_bytes, write_atomically
from .containers import write_whole
from .errors import LayoutError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, Stated, numbered_shards
from .settings import ImportSettings
from .taps import output_ids_with_embeddings, require_no_last

NAME = "DeepSpec"
VERSION = 2
SHARD_SIZE = 512
# sample_id, shard_id, seq_len, and where the five arrays of the sample begin in the shard's file
RECORD = struct.Struct("<QIIQQQQQ")
RECORD_FIELDS = np.dtype([("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), ("offsets", "<u8", (5,))])
FIXED = {
    "version": VERSION,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": RECORD.size,
}
DTYPE = torch.bfloat16


class DeepSpecExporter:
    """shard-{k}.bin with whole samples, samples.idx and manifest.json."""

    def __init__(self, job: ExportJob) -> None:
        self._job = job
        taps = job.captured.taps
        self._ids = output_ids_with_embeddings(taps, NAME)
        require_no_last(taps, NAME, "it forbids that id, because its cache and its evaluation disagree on the norm")
        self._final = job.final_state("post", NAME)
        self._shard_size = job.settings.shard_size or SHARD_SIZE
        job.note_dtype(DTYPE, NAME)

    def pieces(self) -> Iterator[Piece]:
        return numbered_shards(self._job, self._shard_size, lambda shard: self._job.dest / _shard_name(shard))

    def write(self, piece: Piece) -> None:
        def write_samples(file: IO[bytes]) -> None:
            for number in range(piece.first, piece.stop):
                for array in self._arrays(number):
                    file.write(tensor_bytes(array.contiguous()))

        write_whole(piece.path, write_samples)

    def finish(self) -> None:
        write_whole(self._job.dest / "samples.idx", self._write_index)
        job, shards = self._job, -(-len(self._job) // self._shard_size)
        manifest = {
            **FIXED,
            "num_samples": len(job),
            "num_shards": shards,
            "target_layer_ids": self._ids,
            "hidden_size": job.captured.taps.H,
            "target_model_name_or_path": job.target_model(),
            "min_loss_tokens": job.settings.min_supervised,
            "shards": [{"shard_id": shard, "file_name": _shard_name(shard)} for shard in range(shards)],
        }
        write_atomically(job.dest / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")

    def _arrays(self, number: int) -> tuple[Tensor, ...]:
        job = self._job
        mask = job.loss_mask(number)
        return (
            job.input_ids(number),
            torch.ones_like(mask),
            mask,
            job.flat_aux(number, DTYPE),
            job.final(self._final, number, DTYPE),
        )

    def _write_index(self, file: IO[bytes]) -> None:
        taps = self._job.captured.taps
        for piece in self.pieces():
            offset, shard = 0, piece.first // self._shard_size
            for number in range(piece.first, piece.stop):
                S = self._job.length(number)
                starts = [offset]
                for size in _array_bytes(S, taps.K, taps.H):
                    starts.append(starts[-1] + size)
                file.write(RECORD.pack(number, shard, S, *starts[:5]))
                offset = starts[5]


class DeepSpecReader:
    """Samples by the table's offsets."""

    final: Norm | None = "post"

    def __init__(self, settings: ImportSettings) -> None:
        self._folder = settings.folder
        manifest = _read_manifest(settings.folder / "manifest.json")
        ids = tuple(manifest["target_layer_ids"])
        self.stated = Stated(layer_ids=ids, model=manifest.get("target_model_name_or_path"))
        self._K, self._H = len(ids), manifest["hidden_size"]
        self._files = {shard["shard_id"]: shard["file_name"] for shard in manifest["shards"]}
        self._index = _read_index(settings.folder / "samples.idx", manifest["num_samples"])

    def __len__(self) -> int:
        return len(self._index)

    def read(self, number: int) -> ForeignSample:
        record = self._index[number]
        shard = int(record["shard_id"])
        if shard not in self._files:
            raise LayoutError(f"{self._folder / 'manifest.json'} has no shard {shard}, where sample {number} is.")
        path = self._folder / Path(self._files[shard]).name
        S, starts = int(record["seq_len"]), [int(start) for start in record["offsets"]]
        dtypes = (torch.int32, torch.uint8, torch.uint8, DTYPE, DTYPE)
        try:
            with path.open("rb") as file:
                arrays = [
                    _read_array(file, start, size, dtype, path)
                    for start, size, dtype in zip(starts, _array_bytes(S, self._K, self._H), dtypes, strict=True)
                ]
        except FileNotFoundError as error:
            raise LayoutError(f"{path} is missing, where sample {number} is.") from error
        return ForeignSample(arrays[0], arrays[2], arrays[3].view(S, -1), arrays[4].view(S, -1))


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.bin"


def _array_bytes(S: int, K: int, H: int) -> tuple[int, int, int, int, int]:
    """Return the bytes of ids, attention mask, loss mask, auxiliary states and last states."""
    return 4 * S, S, S, 2 * S * K * H, 2 * S * H


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = of_type(dict, json.loads(path.read_bytes()))
        wrong = {name: manifest[name] for name, value in FIXED.items() if manifest[name] != value}
        list_of(int, manifest["target_layer_ids"])
        for shard in list_of(dict, manifest["shards"]):
            of_type(int, shard["shard_id"]), of_type(str, shard["file_name"])
        of_type(int, manifest["num_samples"])
        if not manifest["target_layer_ids"] or of_type(int, manifest["hidden_size"]) < 1:
            raise ValueError(f"{len(manifest['target_layer_ids'])} layers of {manifest['hidden_size']} channels")
    except FileNotFoundError as error:
        raise LayoutError(f"{path.parent} is no {NAME} cache: it holds no {path.name}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"{path} is no manifest of a {NAME} cache: {error!r}") from error
    if wrong:
        raise LayoutError(f"{path}: expected {FIXED}, found {wrong}.")
    return manifest


def _read_index(path: Path, samples: int) -> NDArray[Any]:
    expected = RECORD.size * samples
    if not path.is_file() or path.stat().st_size != expected:
        raise LayoutError(f"{path} should have {expected} bytes, {RECORD.size} for each of {samples} samples.")
    return np.fromfile(path, RECORD_FIELDS)


def _read_array(file: IO[bytes], start: int, size: int, dtype: torch.dtype, path: Path) -> Tensor:
    file.seek(start)
    data = bytearray(file.read(size))
    if len(data) != size:
        raise LayoutError(f"{path} ends at byte {start + len(data)}; {size - len(data)} more were due.")
    return torch.frombuffer(data, dtype=dtype)


DEEPSPEC = Format("deepspec", DeepSpecExporter, DeepSpecReader, options=frozenset({"target_model", "shard_size"}))
