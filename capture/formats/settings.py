"""What one export or import is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...models.errors import UsageError
from ...models.layer_ids import CONVENTIONS
from .final_state import Norm


@dataclass(frozen=True)
class ExportSettings:
    """One export. Which of the optional fields a layout knows is said by its `Format.options`.

    Attributes:
        source: the capture. to: name of the layout. dest: the folder that is filled.
        algorithm: for layouts that differ by it.
        head: folder of norm, lm_head and embeddings; None for the capture's own.
        norm: which last hidden states, for layouts that can hold either.
        target_model: how the trainer names the model; None takes the capture's name.
        target_vocab_size: V where no head says it. draft_vocab_size: D; None is all of V.
        target_probs_topk: most likely tokens of the teacher to keep; None keeps the distribution whole.
        seq_length: padded length T; longer samples are cut. None takes the longest sample's.
        shard_size: samples of a shard. min_supervised: supervised tokens a sample needs.
        compress: whether each file is gzipped.
    """

    source: Path
    to: str
    dest: Path
    algorithm: str | None = None
    head: Path | None = None
    trust_remote_code: bool = False
    norm: Norm | None = None
    target_model: str | None = None
    target_vocab_size: int | None = None
    draft_vocab_size: int | None = None
    target_probs_topk: int | None = None
    seq_length: int | None = None
    shard_size: int | None = None
    min_supervised: int = 1
    compress: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Path(self.source))
        object.__setattr__(self, "dest", Path(self.dest))
        if self.norm not in (None, "pre", "post"):
            raise UsageError(f"norm must be pre or post; got {self.norm!r}.")
        _require_positive(
            self, "target_vocab_size", "draft_vocab_size", "target_probs_topk", "seq_length", "shard_size"
        )
        if self.min_supervised < 0:
            raise UsageError(f"min_supervised must be at least 0; got {self.min_supervised}.")

    def chosen(self) -> dict[str, object]:
        """The options that were given, by name."""
        given = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in given.items() if value not in (None, False)}


@dataclass(frozen=True)
class ImportSettings:
    """One import. What the files say themselves needs no option, and an option says otherwise.

    Attributes:
        folder: the foreign data set. layout: name of its layout. out: the folder that is filled.
        model: folder or hub id of the model that made it. n: its decoder layers, where no model is given.
        layer_ids: K ids under `convention`; None takes what the files say. convention: None takes the layout's own.
        final: what the last hidden states are; None takes what the layout or the files say.
        first_token: the first token of every sample, for a layout that lost it.
        pad_id: the id that samples are padded with, for a layout that does not say their length.
        shard_rows: rows at which a shard is full; a sample is never cut.
    """

    folder: Path
    layout: str
    out: Path
    model: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    n: int | None = None
    layer_ids: tuple[int, ...] | None = None
    convention: str | None = None
    final: Norm | None = None
    first_token: int | None = None
    pad_id: int | None = None
    shard_rows: int = 262_144

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        object.__setattr__(self, "out", Path(self.out))
        if self.final not in (None, "pre", "post"):
            raise UsageError(f"final must be pre or post; got {self.final!r}.")
        if self.convention not in (None, *CONVENTIONS):
            raise UsageError(f"convention must be one of {', '.join(CONVENTIONS)}; got {self.convention!r}.")
        _require_positive(self, "n", "shard_rows")


OPTIONS = (
    "norm", "target_model", "target_vocab_size", "draft_vocab_size", "target_probs_topk", "seq_length", "shard_size", "compress",
)  # fmt: skip


def _require_positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1; got {value}.")
