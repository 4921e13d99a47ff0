"""SpecForge's offline features: one container per sample, its keys named by the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .containers import load_container, save_container, tensor_of
from .errors import LayoutError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, SampleFiles, Stated, int64
from .selection import Rule
from .settings import ExportSettings, ImportSettings
from .taps import output_ids, require_no_last, require_three
from .vocabulary import DraftVocabulary

NAME = "SpecForge"
GROUP = 2000
DTYPE = torch.bfloat16
SUFFIXES = (".ckpt", ".ckpt.gz")
LAST_KEYS = {"eagle3": "hidden_state", "dspark": "target_last_hidden_states"}


class SpecForgeExporter(SampleFiles):
    """rows_{g}-{g+2000}/data_{i}.ckpt[.gz], numbers padded with zeros: the trainer sorts paths as text."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job, self._path_of)
        self._algorithm = str(job.settings.algorithm)
        taps = job.captured.taps
        output_ids(taps, NAME)
        require_no_last(taps, NAME, "its serving engine accepts that id and never captures the layer")
        if self._algorithm == "eagle3":
            require_three(taps, f"{NAME}'s eagle3")
        self._last_key = LAST_KEYS.get(self._algorithm)
        self._final = job.final_state("post", NAME) if self._last_key else None
        self._V = self._vocabulary_size()
        job.note_dtype(DTYPE, NAME)

    def write(self, piece: Piece) -> None:
        save_container(piece.path, self._record(piece.first))

    def finish(self) -> None:
        if self._V is not None:
            save_vocabulary(self._job.dest / "vocab_mapping" / "vocab_mapping.pt", self._job.vocabulary)

    def _record(self, number: int) -> dict[str, Tensor]:
        job = self._job
        key = "aux_hidden_state" if self._algorithm == "eagle3" else "hidden_states"
        record = {
            "input_ids": int64(job.input_ids(number)),
            "loss_mask": int64(job.loss_mask(number)),
            key: job.flat_aux(number, DTYPE)[None],
        }
        if self._last_key and self._final:
            record[self._last_key] = job.final(self._final, number, DTYPE)[None]
        return record

    def _path_of(self, number: int) -> Path:
        first = number // GROUP * GROUP
        suffix = SUFFIXES[1] if self._job.settings.compress else SUFFIXES[0]
        return self._job.dest / f"rows_{first:08d}-{first + GROUP:08d}" / f"data_{number:08d}{suffix}"

    def _vocabulary_size(self) -> int | None:
        needed_for = f"{NAME}'s vocabulary mapping"
        settings = self._job.settings
        if (
            self._algorithm == "eagle3"
            or self._job.has_draft_vocabulary
            or settings.target_vocab_size
            or self._job.head.is_there
        ):
            return self._job.vocab_size(needed_for)
        self._job.note(f"no vocabulary mapping is written: {needed_for} needs --target-vocab-size or a head")
        return None


class SpecForgeReader:
    """Every container below the folder, in the order that the trainer takes."""

    final: Norm | None = "post"

    def __init__(self, settings: ImportSettings) -> None:
        self.stated = Stated()
        self._paths = sorted(p for p in settings.folder.rglob("*") if p.name.endswith(SUFFIXES))
        if not self._paths:
            raise LayoutError(f"{settings.folder} holds no {' or '.join(SUFFIXES)} file, so it is no data of {NAME}.")

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, number: int) -> ForeignSample:
        path = self._paths[number]
        values = load_container(path)
        aux = tensor_of(values, "aux_hidden_state" if "aux_hidden_state" in values else "hidden_states", path)
        return ForeignSample(
            tensor_of(values, "input_ids", path), tensor_of(values, "loss_mask", path), unbatched(aux, path), _last(values, path)
        )  # fmt: skip


def save_vocabulary(path: Path, vocabulary: DraftVocabulary) -> None:
    """Write the mapping between draft and target vocabulary, as SpecForge and AngelSlim read it."""
    save_container(path, {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d})


def unbatched(rows: Tensor, path: Path) -> Tensor:
    """Return (S, W) of (1, S, W) or (S, W)."""
    if rows.ndim == 3 and rows.shape[0] == 1:
        return rows[0]
    if rows.ndim != 2:
        raise LayoutError(f"{path}: expected hidden states of shape (1, S, W) or (S, W), found {tuple(rows.shape)}.")
    return rows


def _last(values: Mapping[str, Any], path: Path) -> Tensor | None:
    for key in LAST_KEYS.values():
        if key in values:
            return unbatched(tensor_of(values, key, path), path)
    return None


def _rule(settings: ExportSettings) -> Rule:
    return Rule(settings.min_supervised, consecutive=settings.algorithm != "eagle3")


SPECFORGE = Format(
    "specforge",
    SpecForgeExporter,
    SpecForgeReader,
    algorithms=("eagle3", "dflash", "domino", "dspark"),
    options=frozenset({"target_vocab_size", "draft_vocab_size", "draft_vocab", "compress"}),
    rule=_rule,
)
