"""Model-Optimizer's dumps: one container per sample in the model's own dtype, the conversation's id inside."""

from __future__ import annotations

from .containers import load_container, save_container, tensor_of
from .errors import LayoutError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, SampleFiles, Stated, int64
from .settings import ImportSettings
from .taps import output_ids, require_no_last

NAME = "Model-Optimizer"
PRE_NORM = "hidden_states_prenorm"


class ModelOptExporter(SampleFiles):
    """{i}.pt; the reader takes any list of files, so the id of a conversation never becomes a name."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job, lambda number: job.dest / f"{number:08d}.pt")
        taps = job.captured.taps
        output_ids(taps, NAME)
        require_no_last(taps, NAME, "its dumps hold that layer after the final norm, its online training before it")
        self._norm = job.settings.norm or "post"
        self._final = job.final_state(self._norm, NAME)

    def write(self, piece: Piece) -> None:
        job, number = self._job, piece.first
        dtype = job.captured.dtype
        record: dict[str, object] = {
            "input_ids": int64(job.input_ids(number)),
            "hidden_states": job.final(self._final, number, dtype),
            "aux_hidden_states": job.flat_aux(number, dtype),
            "loss_mask": int64(job.loss_mask(number)),
            "conversation_id": job.who(number).sample_id,
        }
        if self._norm == "pre":
            record[PRE_NORM] = True
        save_container(piece.path, record)

    def finish(self) -> None:
        """Nothing stands beside the rows."""


class ModelOptReader:
    """Every .pt file below the folder, by sorted path."""

    def __init__(self, settings: ImportSettings) -> None:
        self.stated = Stated()
        self._paths = sorted(settings.folder.rglob("*.pt"))
        if not self._paths:
            raise LayoutError(f"{settings.folder} holds no .pt file, so it is no dump of {NAME}.")
        self._pre = self._is_pre(0)
        self.final: Norm | None = "pre" if self._pre else "post"

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, number: int) -> ForeignSample:
        path = self._paths[number]
        values = load_container(path)
        if bool(values.get(PRE_NORM, False)) != self._pre:
            raise LayoutError(f"{path}: {PRE_NORM} differs from that of {self._paths[0]}; import the two kinds apart.")
        ids = tensor_of(values, "input_ids", path)
        # A dump for training on all tokens has no mask.
        mask = tensor_of(values, "loss_mask", path) if "loss_mask" in values else ids.new_ones(ids.shape)
        named = values.get("conversation_id")
        return ForeignSample(
            ids,
            mask,
            tensor_of(values, "aux_hidden_states", path),
            tensor_of(values, "hidden_states", path),
            None if named is None else str(named),
        )

    def _is_pre(self, number: int) -> bool:
        return bool(load_container(self._paths[number]).get(PRE_NORM, False))


MODELOPT = Format("modelopt", ModelOptExporter, ModelOptReader, options=frozenset({"norm"}))
