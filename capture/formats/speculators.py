"""speculators' training data: a saved data set of token rows, and one safetensors file of hidden states per row."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...models.errors import UsageError
from .containers import save_container, write_whole
from .errors import LayoutError, SampleError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, SampleFiles, Stated, int64
from .settings import ImportSettings
from .taps import require_layers
from .tensor_file import write_tensors

NAME = "speculators"
DTYPE = torch.bfloat16
BATCH_ROWS = 1000


class SpeculatorsExporter(SampleFiles):
    """hidden_states/hs_{row}.safetensors, the names that the reader asks for, beside the data set itself."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job, lambda number: job.dest / "hidden_states" / f"hs_{number}.safetensors")
        _datasets()
        require_layers(job.captured.taps, NAME)
        self._final = job.final_state("pre", NAME)
        self._V = job.vocab_size(f"{NAME}' d2t.npy and t2d.npy") if job.has_draft_vocabulary else None
        job.note_dtype(DTYPE, NAME)

    def write(self, piece: Piece) -> None:
        job, number = self._job, piece.first
        states = (job.aux(number, DTYPE), job.final(self._final, number, DTYPE)[:, None])
        write_tensors(piece.path, {"hidden_states": torch.cat(states, 1), "token_ids": int64(job.input_ids(number))})

    def finish(self) -> None:
        self._save_rows()
        counts = self._job.selection.token_counts
        used = np.flatnonzero(counts)
        frequencies = dict(zip(used.tolist(), counts[used].tolist(), strict=True))
        save_container(self._job.dest / "token_freq.pt", frequencies)
        if self._V is not None:
            vocabulary = self._job.vocabulary
            for name, tensor in (("d2t", vocabulary.d2t), ("t2d", vocabulary.t2d)):
                _save_array(self._job.dest / f"{name}.npy", tensor.numpy())

    def _save_rows(self) -> None:
        """Write the data set with its own library, through a folder beside DEST: a data set cannot be saved over its source."""
        datasets = _datasets()
        beside = Path(tempfile.mkdtemp(prefix=".hiddentap-", dir=self._job.dest.resolve().parent))
        try:
            rows = datasets.Dataset.from_file(str(_write_arrow(datasets, beside / "rows.arrow", self._job)))
            with _Quiet(datasets):
                rows.with_format("torch").save_to_disk(str(self._job.dest))
        finally:
            shutil.rmtree(beside)


class SpeculatorsReader:
    """The rows of the data set with the states of each; a row whose tokens differ from its file's is a fault."""

    final: Norm | None = "pre"

    def __init__(self, settings: ImportSettings) -> None:
        self.stated = Stated(convention="boundary")
        self._states = settings.folder / "hidden_states"
        try:
            self._rows = _datasets().load_from_disk(str(settings.folder)).with_format("numpy")
        except (OSError, ValueError, KeyError) as error:
            raise LayoutError(f"{settings.folder} is no saved data set, so no data of {NAME}: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, number: int) -> ForeignSample:
        row = self._rows[number]
        path = self._states / f"hs_{number}.safetensors"
        if not path.is_file():
            raise SampleError(f"{path.name} is missing")
        try:
            tensors = load_file(path)
            states, ids = tensors["hidden_states"], tensors["token_ids"]
        except (SafetensorError, KeyError, OSError) as error:
            raise LayoutError(f"{path} does not hold hidden_states and token_ids: {error!r}") from error
        if not np.array_equal(ids.numpy(), row["input_ids"]):
            raise SampleError(f"the token ids in {path.name} are not those of the row")
        if states.ndim != 3 or states.shape[1] < 2:
            raise LayoutError(f"{path}: expected hidden_states (S, L+1, H), found {tuple(states.shape)}.")
        mask = torch.from_numpy(np.array(row["loss_mask"]))
        return ForeignSample(ids, mask, states[:, :-1].flatten(1), states[:, -1])


class _Quiet:
    """Keeps the library's own bar off the screen."""

    def __init__(self, datasets: ModuleType) -> None:
        self._datasets: Any = datasets

    def __enter__(self) -> None:
        self._shown = not self._datasets.are_progress_bars_disabled()
        self._datasets.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._datasets.enable_progress_bars()


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{NAME}' layout is a saved Hugging Face data set; install the library: pip install 'hiddentap[datasets]'."
        ) from error
    return datasets


def _write_arrow(datasets: Any, path: Path, job: ExportJob) -> Path:
    import pyarrow

    ids = datasets.List(datasets.Value("int64"))
    schema = datasets.Features({"input_ids": ids, "loss_mask": ids, "seq_len": datasets.Value("int64")}).arrow_schema
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for batch in _batches(job):
            stream.write_batch(pyarrow.RecordBatch.from_pydict(batch, schema=schema))
    return path


def _batches(job: ExportJob) -> Iterator[dict[str, list[Any]]]:
    for first in range(0, len(job), BATCH_ROWS):
        numbers = range(first, min(first + BATCH_ROWS, len(job)))
        yield {
            "input_ids": [job.input_ids(number).numpy().astype(np.int64) for number in numbers],
            "loss_mask": [job.loss_mask(number).numpy().astype(np.int64) for number in numbers],
            "seq_len": [job.length(number) for number in numbers],
        }


def _save_array(path: Path, array: Any) -> None:
    def write(file: IO[bytes]) -> None:
        held = io.BytesIO()
        np.save(held, array, allow_pickle=False)
        file.write(held.getvalue())

    write_whole(path, write)


SPECULATORS = Format(
    "speculators",
    SpeculatorsExporter,
    SpeculatorsReader,
    options=frozenset({"target_vocab_size", "draft_vocab_size", "draft_vocab"}),
)
