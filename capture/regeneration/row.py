"""An input row on its way from a record to a line of a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data import RecordEncoder
from ..data.encoder import record_deadline, record_fields
from ..data.errors import RecordError
from ..data.records.items import RawRecord
from ..data.schema import read_body, read_id
from ..rejects import Reject
from ..sampling import Prompt, SamplingParams
from ..sampling.generation_settings import GenerationSettings
from .dialogue import Dialogue
from .engine import Answer, AnswerEngine
from .pieces import line_of_reject, line_of_sample

_TURNS_APART = (
    40  # bits: the seeds of a turn lie this far from those of the turn before, so that no row meets another's
)


@dataclass(frozen=True)
class Job:
    """Values that all rows of a run share; `seed` is the first row's."""

    settings: GenerationSettings
    encoder: RecordEncoder
    seed: int


class Row:
    """One input row of a piece: its dialogue with an engine, or why there is none."""

    def __init__(self, record: RawRecord, place: int, job: Job) -> None:
        self.record, self._place, self._job = record, place, job
        self.sample_id, self._turn = f"{record.source}:{record.line}", 0
        self._reject: Reject | None = None
        self._known_id: str | None = None
        self._guarded(self._read)

    def next_prompts(self, engine: AnswerEngine) -> list[tuple[int, ...]]:
        """Return the next prompt, if there is one."""
        prompts: list[tuple[int, ...]] = []
        if self._reject is None:
            self._guarded(lambda: prompts.extend(self._next(engine)))
        return prompts

    def take(self, prompt_ids: tuple[int, ...], answer: Answer) -> None:
        """Take the answer to the prompt that `next_prompts` returned."""
        self._dialogue.take(prompt_ids, answer)
        self._turn += 1

    def params(self, prompt_ids: Sequence[int], most: int | None) -> SamplingParams:
        """Return the sampling of the next answer: its own seed, and no more tokens than the model has positions for."""
        params = self._job.settings.params
        room = params.max_new_tokens if most is None else min(params.max_new_tokens, most - len(prompt_ids))
        seed = (self._job.seed + self._place + (self._turn << _TURNS_APART)) % 2**63
        return replace(params, seed=seed, max_new_tokens=room)

    def line(self) -> dict[str, Any]:
        """Return what the piece says of the row; its answers are written."""
        lines: list[dict[str, Any]] = []
        if self._reject is None:
            self._guarded(lambda: lines.append(self._sample_line()))
        return line_of_reject(self._reject) if self._reject is not None else lines[0]

    def _read(self) -> None:
        fields = record_fields(self.record)
        self.sample_id = self._known_id = read_id(fields, self.record.source, self.record.line)
        body = read_body(fields)
        use = fields.use()
        use.require_harmless(strict=False)
        self._unread = use.unread
        self._dialogue = Dialogue(body, self._job.settings.turns, self._job.encoder)

    def _next(self, engine: AnswerEngine) -> list[tuple[int, ...]]:
        ids = self._dialogue.next_prompt()
        if ids is None:
            return []
        most = engine.max_positions
        if most is not None and len(ids) >= most:
            fault: str | None = (
                f"expected fewer than {most} tokens, all that the model has positions for; found {len(ids)}"
            )
        else:
            prompt = Prompt(ids, self.sample_id, self.record.source, self.record.line)
            fault = engine.fault(prompt, self.params(ids, most))
        if fault is None:
            return [ids]
        self._dialogue.stop(fault)
        return []

    def _sample_line(self) -> dict[str, Any]:
        sample = self._dialogue.sample()
        cut = [turn for turn in sample.turns if turn["finish_reason"] == "length"]
        if cut and self._job.settings.drop_truncated:
            raise RecordError(
                "length", f"the answer in message {cut[0]['message']} ended by length, after {cut[0]['tokens']} tokens"
            )
        if not any(sample.loss_mask):
            raise RecordError(
                "unsupervised", "expected at least one supervised token; found marks that leave out every turn"
            )
        told = line_of_sample(self.sample_id, self.record.source, self.record.line, sample)
        return told | ({"unread": list(self._unread)} if self._unread else {})

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step of the row under the deadline of a record; keep why it is rejected."""
        try:
            with record_deadline():
                step()
        except RecordError as error:
            self._reject = Reject.of(self.record.source, self.record.line, self._known_id, error.reason, error.code)
