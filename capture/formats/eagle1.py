"""EAGLE-1 and -2: one container per sample, the last hidden states alone."""

from __future__ import annotations

from pathlib import Path

import torch

from .containers import load_container, save_container, tensor_of
from .errors import LayoutError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, SampleFiles, Stated, int64
from .settings import ImportSettings

NAME = "EAGLE-1"
GROUP = 1000
DTYPE = torch.float16


class Eagle1Exporter(SampleFiles):
    """data/{index}/data_{i}.ckpt. The trainer loads every file below the folder it is given, so `data` holds nothing else."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job, lambda number: job.dest / "data" / f"{number // GROUP:06d}" / f"data_{number:08d}.ckpt")
        self._final = job.final_state("post", NAME)
        if job.captured.taps.K:
            job.note(f"{NAME} has no auxiliary layers: those of the capture are left out")
        job.note_dtype(DTYPE, NAME)

    def write(self, piece: Piece) -> None:
        job, number = self._job, piece.first
        save_container(
            piece.path,
            {
                "input_ids": int64(job.input_ids(number)),
                "hidden_state": job.final(self._final, number, DTYPE),
                "loss_mask": int64(job.loss_mask(number)),
            },
        )

    def finish(self) -> None:
        """Nothing stands beside the rows."""


class Eagle1Reader:
    """Every container below the folder, by sorted path."""

    final: Norm | None = "post"

    def __init__(self, settings: ImportSettings) -> None:
        self.stated = Stated(layer_ids=())
        self._paths: list[Path] = sorted(settings.folder.rglob("*.ckpt"))
        if not self._paths:
            raise LayoutError(f"{settings.folder} holds no .ckpt file, so it is no data of {NAME}.")

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, number: int) -> ForeignSample:
        path = self._paths[number]
        values = load_container(path)
        ids, mask, last = (tensor_of(values, key, path) for key in ("input_ids", "loss_mask", "hidden_state"))
        return ForeignSample(ids, mask, None, last)


EAGLE1 = Format("eagle1", Eagle1Exporter, Eagle1Reader)
