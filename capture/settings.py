"""Settings that a capture and a generation share, in the groups that the command's help shows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..hooks import Taps
from ..models.checked_fields import CheckedFields
from ..models.choices import Algorithm, Convention, Final
from ..models.errors import UsageError
from ..models.layer_choice import LayerChoice
from ..models.model_source import ModelSource
from .data.audit import MAX_REJECT_RATE, RejectGate
from .data.options import Rendering, TextRules

# Of two letters or more: one letter is a drive. One slash is enough: a pathlib path has dropped the other.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class RunPlaces(CheckedFields):
    """Settings of a run's input and output.

    Attributes:
        model: which model, and how it computes; a string names it.
        data: files or data sets of conversations, texts or token ids; a string names one.
        out: the folder that is filled, on a file system of this machine.
    """

    model: ModelSource
    data: tuple[str, ...]
    out: Path

    def __post_init__(self) -> None:
        if isinstance(self.model, str | Path):
            object.__setattr__(self, "model", ModelSource(str(self.model)))
        data = [self.data] if isinstance(self.data, str | Path) else self.data
        if isinstance(data, list | tuple):
            object.__setattr__(self, "data", tuple(str(one) if isinstance(one, Path) else one for one in data))
        require_local(self.out)  # before it becomes a path, which would drop a slash of an address
        super().__post_init__()
        if not self.data:
            raise UsageError("no data was given; expected at least one file or data set.")


@dataclass(frozen=True, kw_only=True)
class LayerSettings(CheckedFields):
    """Settings of the states that leave the model.

    Attributes:
        layer_ids: K ids of the system `ids_of`.
        convention: ``layer_output`` or ``boundary``, which are systems too, by their older option; not beside `ids_of`.
        ids_of: whose ids they are, or those of `draft_config`: layer_output (default), boundary, vllm, specforge, ...; see
            `models.id_systems`.
        draft_config: a drafter's config.json to take the ids from, instead of `layer_ids`.
        algorithm: take the default layers of eagle3, dflash or dspark instead.
        adapter: how the residual stream is read where it is not plain; see `models.adapters`.
        final: norm states to store beside them.
    """

    layer_ids: tuple[int, ...] | None = field(default=None, kw_only=False)
    convention: Convention | None = None
    ids_of: str | None = None
    draft_config: Path | None = None
    algorithm: Algorithm | None = None
    adapter: str | None = None
    final: Final = "pre"

    def __post_init__(self) -> None:
        self.layers.require_named()  # before the types of all fields: the texts about layer ids are a contract
        super().__post_init__()

    @property
    def layers(self) -> LayerChoice:
        """The layers, as one way of naming them."""
        return LayerChoice(self.layer_ids, self.convention, self.ids_of, self.draft_config, self.algorithm)

    def tap_names(self, taps: Taps) -> tuple[str, ...]:
        """Return the names of the taps in the words of the requested ids, in slot order."""
        ids, convention = self.layers.as_ids(taps.boundaries)
        word = "layer" if convention == "layer_output" else "boundary"
        return tuple(f"{word} {i}" for i in ids) + taps.names[len(ids) :]


@dataclass(frozen=True, kw_only=True)
class FolderSettings(CheckedFields):
    """Settings of what is written beside the rows, and of rows per shard.

    Attributes:
        head: whether the final norm, the lm_head and the embeddings are written to OUT/head as well.
        shard_rows: most rows of one shard; a longer sample has a shard of its own.
    """

    head: bool = False
    shard_rows: int = 262_144

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(shard_rows=1)


@dataclass(frozen=True, kw_only=True)
class InputSettings(Rendering):
    """Settings of which records are read and how a conversation is rendered.

    Attributes:
        limit: read only so many input rows.
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(limit=1)


@dataclass(frozen=True, kw_only=True)
class TextSettings(TextRules, InputSettings):
    """Settings that turn input records into samples.

    Attributes:
        workers: tokenizing processes; 0 tokenizes in this one.
        max_reject_rate: share of rows, 0 to 1, that may be rejected before the run ends with an error.
        allow_rejects: short for a `max_reject_rate` of 1.

    Raises:
        UsageError: a value out of range; UsageTypeError for a wrong type.

    Example:
        >>> text = TextSettings(max_length=2048, on_too_long="drop", loss_on="last")
        >>> CaptureSettings("MODEL", "chats.jsonl", "OUT2", layer_ids=[1], text=text).text.max_length
        2048
    """

    workers: int = 0
    max_reject_rate: float = MAX_REJECT_RATE
    allow_rejects: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(workers=0)
        if not 0 <= self.max_reject_rate <= 1:
            raise UsageError(f"max_reject_rate must lie within 0..1; got {self.max_reject_rate}.")

    def fitted_to(self, positions: int | None) -> tuple[TextSettings, str | None]:
        """Return the settings with no more tokens a sample than a model has positions, and a note where that is fewer."""
        if positions is None or positions >= self.max_length:
            return self, None
        note = f"the model has {positions} positions, so samples are held to {positions} tokens instead of {self.max_length}"
        return replace(self, max_length=positions), note

    def gate(self) -> RejectGate:
        """Return a fresh count of rejects, which ends the run as `max_reject_rate`, `strict` and `on_dropped` ask."""
        rate = 1.0 if self.allow_rejects else self.max_reject_rate
        return RejectGate(rate, strict=self.strict, raise_on_dropped=self.on_dropped == "raise")


def require_local(place: object) -> None:
    """Raise UsageError where a place to write to is the address of an object store: it would become a folder of this machine."""
    if _ADDRESS.match(str(place)):
        raise UsageError(
            f"{place} is an address, and files are written to folders of this machine only; give a folder, such as one where "
            "the store is mounted."
        )
