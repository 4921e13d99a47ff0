"""AngelSlim's offline data: containers with a batch dimension of one, EAGLE-3 or DFlash."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .containers import load_container, save_container, tensor_of
from .errors import LayoutError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, SampleFiles, Stated, int64
from .selection import Rule
from .settings import ExportSettings, ImportSettings
from .specforge import save_vocabulary, unbatched
from .taps import output_ids, require_no_last, require_three

NAME = "AngelSlim"
GROUP = 5000
DTYPE = torch.bfloat16


class AngelSlimExporter(SampleFiles):
    """EAGLE-3: rank_0/rows_{a}-{a+5000}/data_{i}.ckpt. DFlash: shard_{k}/sample_{i}_rank0.ckpt."""

    def __init__(self, job: ExportJob) -> None:
        self._eagle3 = job.settings.algorithm == "eagle3"
        super().__init__(job, self._eagle3_path if self._eagle3 else self._dflash_path)
        taps = job.captured.taps
        output_ids(taps, NAME)
        require_no_last(
            taps, NAME, "one of its ways to make data gives that layer before the final norm, the other after it"
        )
        self._final = self._V = None
        if self._eagle3:
            require_three(taps, f"{NAME}'s eagle3")
            self._final = job.final_state("post", NAME)
            self._V = job.vocab_size(f"{NAME}'s vocabulary mapping")
        job.note_dtype(DTYPE, NAME)

    def write(self, piece: Piece) -> None:
        save_container(piece.path, self._record(piece.first))

    def finish(self) -> None:
        if self._V is not None:
            save_vocabulary(self._job.dest / "vocab_mapping.pt", self._job.vocabulary)

    def _record(self, number: int) -> dict[str, Tensor]:
        job = self._job
        input_ids = int64(job.input_ids(number))[None]
        record = {
            "input_ids": input_ids,
            "loss_mask": int64(job.loss_mask(number))[None],
            "hidden_states": job.flat_aux(number, DTYPE)[None],
        }
        if self._final:
            return record | {"target_hiddens": job.final(self._final, number, DTYPE)[None]}
        return record | {"attention_mask": torch.ones_like(input_ids)}

    def _eagle3_path(self, number: int) -> Path:
        first = number // GROUP * GROUP
        return self._job.dest / "rank_0" / f"rows_{first:08d}-{first + GROUP:08d}" / f"data_{number - first:08d}.ckpt"

    def _dflash_path(self, number: int) -> Path:
        return self._job.dest / f"shard_{number // GROUP:05d}" / f"sample_{number:08d}_rank0.ckpt"


class AngelSlimReader:
    """Every container below the folder, by sorted path as the trainer takes them."""

    final: Norm | None = "post"

    def __init__(self, settings: ImportSettings) -> None:
        self.stated = Stated()
        self._paths = sorted(settings.folder.rglob("*.ckpt"))
        if not self._paths:
            raise LayoutError(f"{settings.folder} holds no .ckpt file, so it is no data of {NAME}.")

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, number: int) -> ForeignSample:
        path = self._paths[number]
        values = load_container(path)
        last = values.get("target_hiddens")
        return ForeignSample(
            tensor_of(values, "input_ids", path).flatten(),
            tensor_of(values, "loss_mask", path).flatten(),
            unbatched(tensor_of(values, "hidden_states", path), path),
            None if last is None else unbatched(tensor_of(values, "target_hiddens", path), path),
        )


def _rule(settings: ExportSettings) -> Rule:
    return Rule(settings.min_supervised)


ANGELSLIM = Format(
    "angelslim",
    AngelSlimExporter,
    AngelSlimReader,
    algorithms=("eagle3", "dflash"),
    options=frozenset({"target_vocab_size", "draft_vocab_size", "draft_vocab"}),
    rule=_rule,
)
