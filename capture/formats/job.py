"""One export: what is exported, and how its rows are read."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..progress import Progress
from .captured import CapturedFolder, Who
from .errors import FormatError, LayoutError
from .final_state import FinalState, Norm
from .head_folder import HeadFolder
from .selection import Rule, Selection, select
from .settings import ExportSettings
from .vocabulary import DraftVocabulary, draft_vocabulary, require_within
from .vocabulary_file import read_vocabulary

DTYPE_WORDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class ExportJob:
    """The samples of one export by number, 0..N-1.

    The selection is made at its first use, so that a request that cannot be met is refused before anything is read.
    """

    def __init__(
        self, captured: CapturedFolder, head: HeadFolder, settings: ExportSettings, rule: Rule, progress: Progress
    ) -> None:
        self.captured, self.head, self.settings = captured, head, settings
        self._rule, self._progress = rule, progress
        self._V: int | None = None

    @property
    def dest(self) -> Path:
        return self.settings.dest

    @cached_property
    def selection(self) -> Selection:
        """Return which samples are exported; raises RunError where none is left."""
        return select(self.captured, self._rule, self._progress)

    def __len__(self) -> int:
        return len(self.selection)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def length(self, number: int) -> int:
        """Rows of the sample, after cutting."""
        return int(self.selection.lengths[number])

    def who(self, number: int) -> Who:
        return self.captured.who(self._index(number))

    def input_ids(self, number: int) -> Tensor:
        """(S,) int32"""
        return self.captured.input_ids(self._index(number))[: self.length(number)]

    def loss_mask(self, number: int) -> Tensor:
        """(S,) uint8"""
        return self.captured.loss_mask(self._index(number))[: self.length(number)]

    def aux(self, number: int, dtype: torch.dtype) -> Tensor:
        """(S, K, H)"""
        rows = self.captured.aux_hidden_states(self._index(number), self.length(number))
        return self._as(rows, dtype, number, "aux_hidden_states")

    def flat_aux(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return (S, K * H): the layers side by side in slot order."""
        return self.aux(number, dtype).flatten(1)

    def final_state(self, wanted: Norm, trainer: str) -> FinalState:
        """Return the last hidden states; raises FormatError where they cannot be had."""
        state = FinalState(self.captured, self.head, wanted, trainer)
        if state.derived:
            self.note("post-norm is made from pre-norm by the model's own norm module")
        return state

    def final(self, state: FinalState, number: int, dtype: torch.dtype) -> Tensor:
        """(S, H)"""
        return self._as(state.rows(self._index(number), self.length(number)), dtype, number, "the last hidden states")

    def note_dtype(self, dtype: torch.dtype, trainer: str) -> None:
        """Tell where rows lose bits."""
        if dtype != self.captured.dtype:
            self.note(
                f"rows are stored as {_word(self.captured.dtype)} and {trainer} holds {_word(dtype)}: they are rounded"
            )

    def vocab_size(self, needed_for: str) -> int:
        """V, from the settings or the head.

        Raises:
            FormatError: neither says it, or the draft vocabulary that was asked for is larger.
        """
        V, D = self.settings.target_vocab_size or self.head.vocab_size, self.settings.draft_vocab_size
        if self.existing_vocabulary is not None:
            V, D = self.existing_vocabulary.V, self.existing_vocabulary.D
        if V is None:
            raise FormatError(
                f"{needed_for} needs the size of the target's vocabulary: give --target-vocab-size, or a head (--head DIR)."
            )
        if D is not None and D > V:
            raise FormatError(f"a draft vocabulary of {D} tokens is larger than the target's {V}.")
        self._V = V
        return V

    @cached_property
    def existing_vocabulary(self) -> DraftVocabulary | None:
        """Return the draft vocabulary of the file that was given; raises LayoutError where it is none of this target."""
        path = self.settings.draft_vocab
        return None if path is None else read_vocabulary(path, self.settings.target_vocab_size or self.head.vocab_size)

    @property
    def has_draft_vocabulary(self) -> bool:
        """Return whether a draft vocabulary was asked for, by its size or by a file."""
        return self.settings.draft_vocab_size is not None or self.settings.draft_vocab is not None

    @property
    def D(self) -> int:
        """D, of the draft vocabulary that was asked for; V without one. To be asked after `vocab_size`."""
        existing = self.existing_vocabulary
        return existing.D if existing else self.settings.draft_vocab_size or self._V or 0

    @cached_property
    def vocabulary(self) -> DraftVocabulary:
        """Return the draft vocabulary that was asked for, of the target tokens whose number an exporter has asked for."""
        if self._V is None:
            raise FormatError(f"{self.settings.to} has no draft vocabulary.")
        if self.existing_vocabulary is not None:
            self._note_coverage(self.existing_vocabulary)
            return self.existing_vocabulary
        return draft_vocabulary(self.selection.token_counts, self._V, self.settings.draft_vocab_size)

    def _note_coverage(self, vocabulary: DraftVocabulary) -> None:
        counts = require_within(self.selection.token_counts, vocabulary.V)
        sayable = int(counts[vocabulary.t2d[: len(counts)].numpy()].sum())
        share = sayable / max(int(counts.sum()), 1)
        self.note(
            f"{self.settings.draft_vocab} names {vocabulary.D} draft tokens: {share:.1%} of the supervised tokens"
        )

    def prepare(self) -> None:
        """Make what is made of all samples together, so that whatever is wrong with it is told before a file is written.

        Raises:
            RunError: no sample is left.
            LayoutError: a token outside the vocabulary.
        """
        _ = self.selection
        if self._V is not None:
            _ = self.vocabulary

    def target_model(self) -> str | None:
        """Return how the trainer shall name the model."""
        named = self.captured.about.model.get("id")
        return self.settings.target_model or named

    def _index(self, number: int) -> int:
        return int(self.selection.indices[number])

    def _as(self, rows: Tensor, dtype: torch.dtype, number: int, what: str) -> Tensor:
        converted = rows.to(dtype)
        if dtype != rows.dtype and not bool(torch.isfinite(converted).all()):
            bad = (~torch.isfinite(converted)).flatten(1).any(1).nonzero()[:, 0]
            raise LayoutError(
                f"sample {self.who(number).sample_id!r}, {what}: {len(bad)} row(s), the first at token {int(bad[0])}, are not "
                f"finite as {_word(dtype)}, which this layout holds."
            )
        return converted


def _word(dtype: torch.dtype) -> str:
    return DTYPE_WORDS.get(dtype, str(dtype).removeprefix("torch."))
