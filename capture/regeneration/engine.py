"""The seam between a regeneration and what writes its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from ...models.errors import UsageError
from ..data import RecordEncoder
from ..engines import ENGINES, engines_that
from ..progress import Progress
from ..sampling import FinishKind, Prompt, SamplingParams
from ..sampling.generation.end_marks import EndMarks
from ..sampling.generation_settings import GenerationSettings


@dataclass(frozen=True)
class Answer:
    """Tokens generated for one prompt.

    Attributes:
        token_ids: the new tokens, the one that ended the answer included.
        finish: why it ended: ``stop_token``, ``stop_string`` or ``length``.
    """

    token_ids: tuple[int, ...]
    finish: FinishKind

    @property
    def end_token(self) -> int | None:
        """Return the end mark that the model wrote; None where something else ended the answer."""
        return self.token_ids[-1] if self.finish == "stop_token" else None

    @property
    def content_ids(self) -> tuple[int, ...]:
        """Return the tokens of the answer itself, without the end mark."""
        return self.token_ids if self.end_token is None else self.token_ids[:-1]


class AnswerEngine(Protocol):
    """Writes answers to prompts.

    Attributes:
        end_marks: the tokens that end an answer, by who names them.
        max_positions: most tokens of prompt and answer together; None where there is no limit.
    """

    @property
    def end_marks(self) -> EndMarks: ...
    @property
    def max_positions(self) -> int | None: ...

    def fault(self, prompt: Prompt, params: SamplingParams) -> str | None:
        """Return why the model cannot answer this prompt; None if it can."""

    def answers(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Answer]:
        """Return the answer to each prompt; equal calls on one machine give equal answers.

        Raises:
            RunError: the engine failed.
        """


@dataclass(frozen=True)
class AnswerEngineKind:
    """One kind of engine, as a regeneration uses it before a model is loaded.

    Attributes:
        refuse: raises UsageError naming the setting, or the missing package, that keeps it from running.
        identity: what of the settings changes answers with this engine, as JSON values.
        piece_rows: input rows that are answered together, and lost together where the run is killed.
        opened: the engine, inside the block.
    """

    refuse: Callable[[GenerationSettings], None]
    identity: Callable[[GenerationSettings], Mapping[str, Any]]
    piece_rows: Callable[[GenerationSettings], int]
    opened: Callable[[GenerationSettings, RecordEncoder, Progress], AbstractContextManager[AnswerEngine]]


def answer_engine_kind(settings: GenerationSettings) -> AnswerEngineKind:
    """Return the kind of engine that `settings` names.

    Raises:
        UsageError: naming what of the settings it cannot do.
    """
    entry = ENGINES[settings.engine]
    if entry.answers is None:
        raise UsageError(
            f"engine {settings.engine} generates nothing; take {engines_that(lambda one: one.answers is not None)}."
        )
    for name in ("return_sampling_mask", "return_logprob"):
        if getattr(settings.params, name):
            raise UsageError(
                f"{name} records the steps of a generation, and here the rows come from a forward over the finished samples; "
                "leave it out, or generate the last turn alone with --engine hf."
            )
    kind: AnswerEngineKind = import_module(entry.answers, __package__).KIND
    kind.refuse(settings)
    return kind
