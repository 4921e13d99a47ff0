"""The Hugging Face model in this process as the engine of a regeneration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ...models.loading import load_model
from ..data import RecordEncoder
from ..progress import Progress
from ..sampling import Prompt, SamplingParams
from ..sampling.generation.cached_model import CachedModel, cached_model
from ..sampling.generation.end_marks import EndMarks
from ..sampling.generation.loop import LoopSettings
from ..sampling.generation.request import GenerationRequest
from ..sampling.generation.run import GenerationRun
from ..sampling.generation_settings import GenerationSettings
from .engine import Answer, AnswerEngineKind

# Enough that the last long answers of a piece, which run in small batches, cost little.
_BATCHES_OF_A_PIECE = 8


class HuggingFaceAnswers:
    """Runs the steps of `generate_with_capture`, and keeps no rows."""

    def __init__(self, model: CachedModel, run: GenerationRun, progress: Progress) -> None:
        self._model, self._run, self._progress = model, run, progress
        # Two: whether requests share steps must not depend on how many there are, or a resumed run would differ.
        self._steps: LoopSettings = run.settings(2)

    @property
    def end_marks(self) -> EndMarks:
        return self._run.end_marks

    @property
    def max_positions(self) -> int | None:
        return self._model.max_positions

    def fault(self, prompt: Prompt, params: SamplingParams) -> str | None:
        return self._run.prompt_fault(prompt, params)

    def answers(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Answer]:
        requests = self._run.requests(prompts, params)
        self._run.loop(self._steps, _nothing_more, progress=self._progress).run(requests)
        return [_answer(request) for request in requests]


@contextmanager
def opened(settings: GenerationSettings, encoder: RecordEncoder, progress: Progress) -> Iterator[HuggingFaceAnswers]:
    """Open the engine, its model loaded in the block; raise as `load_model`, and StepError for a model whose steps fail."""
    loaded = load_model(settings.model)
    model = cached_model(loaded.model, None, "none", adapter=settings.adapter)
    has = encoder.has_tokenizer
    run = GenerationRun(
        model,
        settings.options,
        encoder.tokenizer if has else None,
        template=encoder.template if has else None,
    )
    with model.attached():
        yield HuggingFaceAnswers(model, run, progress)


def _answer(request: GenerationRequest) -> Answer:
    finish = request.finish
    return Answer(tuple(request.token_ids), "length" if finish is None else finish.kind)


def _nothing_more(_request: GenerationRequest) -> None:
    """Rows are not wanted, and the loop itself keeps the tokens."""


def _refuse_nothing(_settings: GenerationSettings) -> None:
    """Settings that exclude each other are refused by `GenerationSettings` itself."""


def _identity(settings: GenerationSettings) -> Mapping[str, Any]:
    return {"steps": asdict(settings.options)}


def _piece_rows(settings: GenerationSettings) -> int:
    return _BATCHES_OF_A_PIECE * settings.options.max_batch


KIND = AnswerEngineKind(_refuse_nothing, _identity, _piece_rows, opened)
