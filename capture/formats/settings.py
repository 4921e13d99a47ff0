"""Settings of one export or import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...models.checked_fields import CheckedFields
from ...models.choices import Convention
from ...models.errors import UsageError
from ...models.layer_ids import check_plain_ids
from ..settings import require_local
from .final_state import Norm


@dataclass(frozen=True)
class ExportSettings(CheckedFields):
    """One export: which capture, into which trainer's layout, and where. `Format.options` lists the optional fields of a layout.

    Attributes:
        source: folder of the capture.
        to: name of the layout.
        dest: folder to fill.
        algorithm: for layouts that differ by it.
        head: folder of norm, lm_head and embeddings; None for the capture's own.
        trust_remote_code: let code that comes with the model run.
        norm: which last hidden states, for layouts that can hold either.
        target_model: the trainer's name of the model; None takes the capture's name.
        target_vocab_size: V where there is no head to read it from.
        draft_vocab_size: D, tokens of the draft vocabulary; None is all of V.
        draft_vocab: file with the d2t and t2d of an existing draft model, whose vocabulary is kept; see `read_vocabulary`.
        target_probs_topk: most likely tokens of the teacher to keep; None keeps the whole distribution.
        seq_length: padded length T in tokens; longer samples are cut. None takes the longest sample's.
        shard_size: samples per file.
        min_supervised: supervised tokens that a sample needs.
        compress: gzip each file.

    Raises:
        UsageError: a value out of range, or a `dest` that is no local folder; UsageTypeError for a wrong type.

    Example:
        >>> ExportSettings("OUT", to="specforge", dest="SPECFORGE").dest
        PosixPath('SPECFORGE')
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
    draft_vocab: Path | None = None
    target_probs_topk: int | None = None
    seq_length: int | None = None
    shard_size: int | None = None
    min_supervised: int = 1
    compress: bool = False

    def __post_init__(self) -> None:
        require_local(self.dest)
        super().__post_init__()
        self.require_at_least(
            target_vocab_size=1, draft_vocab_size=1, target_probs_topk=1, seq_length=1, shard_size=1, min_supervised=0
        )
        if self.draft_vocab is not None and self.draft_vocab_size is not None:
            raise UsageError(
                "draft_vocab (--draft-vocab) is a draft vocabulary with its size, so draft_vocab_size (--draft-vocab-size) and "
                "it exclude each other."
            )

    def chosen(self) -> dict[str, object]:
        """Return the options that were given, by name."""
        given = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in given.items() if value not in (None, False)}


@dataclass(frozen=True)
class ImportSettings(CheckedFields):
    """One import: a trainer's files into a capture. An option overrides what the files state.

    Attributes:
        folder: the foreign data set.
        layout: name of its layout.
        out: folder to fill.
        model: folder or hub id of the model that made it.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: let code that comes with the model run.
        n: decoder layers of the model, where no model is given.
        layer_ids: K ids under `convention`; None takes those of the files.
        convention: None takes the layout's own.
        final: ``pre`` or ``post``, for the last hidden states; None takes what the layout or the files state.
        first_token: id of the first token of every sample, for a layout without it.
        pad_id: id that samples are padded with, for a layout without lengths.
        shard_rows: rows at which a shard is full; a sample is never cut.

    Raises:
        LayerIdError, LayerIdTypeError: `layer_ids` that are no increasing integers.
        UsageError: a value out of range, or an `out` that is no local folder; UsageTypeError for a wrong type.

    Example:
        >>> ImportSettings("DUMP", layout="specforge", out="OUT2", n=4, layer_ids=[0, 1, 2]).layer_ids
        (0, 1, 2)
    """

    folder: Path
    layout: str
    out: Path
    model: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    n: int | None = None
    layer_ids: tuple[int, ...] | None = None
    convention: Convention | None = None
    final: Norm | None = None
    first_token: int | None = None
    pad_id: int | None = None
    shard_rows: int = 262_144

    def __post_init__(self) -> None:
        require_local(self.out)
        if self.layer_ids is not None:  # its texts are a contract
            object.__setattr__(self, "layer_ids", check_plain_ids(self.layer_ids, algorithm="DSPARK"))
        super().__post_init__()
        self.require_at_least(n=1, shard_rows=1)


OPTIONS = (
    "norm", "target_model", "target_vocab_size", "draft_vocab_size", "draft_vocab", "target_probs_topk", "seq_length",
    "shard_size", "compress",
)  # fmt: skip
