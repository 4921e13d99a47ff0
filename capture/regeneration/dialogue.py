"""One input record while its answers are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...models.choices import Turns
from ..data import RecordEncoder
from ..data.chat.conversation import Conversation, Message
from ..data.errors import RecordError
from ..data.records.given_ids import TokenIds
from ..data.schema import Body, Text
from ..sampling.generation.prompts import Prompt, PromptMaker
from .engine import Answer
from .kept_turns import kept_turns
from .written import WrittenSample, WrittenTurn


class Dialogue:
    """Gives a record's prompts one after the other and takes their answers.

    The prompt of a turn is what a chat server makes of the conversation up to there, the new turns in place of the old: one
    rendering by the template. Kept as they are: a turn that a tool's result follows, since the result answers that very call,
    and one that nothing precedes.
    """

    def __init__(self, body: Body, turns: Turns, encoder: RecordEncoder) -> None:
        """Raises RecordError where the record has no turn to write."""
        self._body, self._encoder, self._maker = body, encoder, PromptMaker(encoder)
        self._written: list[WrittenTurn] = []
        self._messages = list(body.messages) if isinstance(body, Conversation) else []
        self._left, self._kept = _places(body, turns)
        self._left_out = 0
        if not self._left:
            raise RecordError("no_prompt", "expected a turn before the assistant's; found the answer alone")

    def next_prompt(self) -> tuple[int, ...] | None:
        """Return the token ids that the next answer goes on from; None where all answers are written.

        Raises:
            RecordError: the template refuses the conversation.
        """
        if not self._left:
            return None
        if not isinstance(self._body, Conversation):
            return self._maker.token_ids(self._body)
        return self._maker.ids_before(replace(self._body, messages=tuple(self._messages[: self._left[0]])))

    def stop(self, fault: str) -> None:
        """End the dialogue before its next turn, which cannot be asked for; RecordError where no turn was written."""
        if not self._written:
            raise RecordError("bad_prompt", fault)
        self._left_out, self._left = len(self._left), []

    def take(self, prompt_ids: tuple[int, ...], answer: Answer) -> None:
        """Put the answer in its place."""
        place = self._left.pop(0)
        self._written.append(WrittenTurn(place, prompt_ids, answer))
        if isinstance(self._body, Conversation):
            self._messages[place : place + 1] = [{"role": "assistant", "content": self._decoded(answer.content_ids)}]

    def sample(self) -> WrittenSample:
        """Return what the answers make of the record; next_prompt has returned None."""
        last = self._written[-1]
        answer = last.answer.token_ids
        body = self._body
        if not isinstance(body, Conversation):
            mask = [0] * len(last.prompt_ids) + [1] * len(answer)
            text = body.prompt + self._decoded(last.answer.content_ids) if isinstance(body, Text) else None
            return self._sample(last, mask, [len(answer)], None, None, text)
        messages = tuple(self._messages[: last.place + 1])
        before = replace(body, messages=messages[:-1], marks=(), token_mask=None)
        mask, supervised = kept_turns(self._encoder, before, last.prompt_ids, self._written[:-1], body.marks)
        says = _is_trained(body, last.place)
        mask += [int(says)] * len(answer)
        return self._sample(last, mask, [*supervised, len(answer) * says], messages, body.tools, None)

    def _sample(
        self,
        last: WrittenTurn,
        mask: Sequence[int],
        supervised: Sequence[int],
        messages: tuple[Message, ...] | None,
        tools: tuple[dict[str, Any], ...] | None,
        text: str | None,
    ) -> WrittenSample:
        turns = tuple(
            {
                "message": one.place,
                "finish_reason": one.answer.finish,
                "end_token": one.answer.end_token,
                "tokens": len(one.answer.token_ids),
                "supervised": count,
            }
            for one, count in zip(self._written, supervised, strict=True)
        )
        ids = (*last.prompt_ids, *last.answer.token_ids)
        return WrittenSample(ids, tuple(mask), messages, tools, text, turns, self._kept, self._left_out)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(
            self._encoder.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def prompt_of(token_ids: tuple[int, ...], sample_id: str, source: str, line: int) -> Prompt:
    """Return the prompt that an engine answers."""
    return Prompt(token_ids, sample_id, source, line)


def _is_trained(conversation: Conversation, place: int) -> bool:
    return not (place < len(conversation.marks) and conversation.marks[place] is False)


def _places(body: Body, turns: Turns) -> tuple[list[int], int]:
    """Return the places of the turns to write, and how many of the assistant's turns are kept as they are."""
    if isinstance(body, Text | TokenIds):
        return [0], 0
    messages, assistant = body.messages, body.assistant_turns
    end = [] if messages[-1]["role"] == "assistant" else [len(messages)]
    asked = assistant if turns == "all" else [] if end else assistant[-1:]
    called = {place for place, message in enumerate(messages[1:]) if message["role"] == "tool"}
    kept = [place for place in asked if place == 0 or place in called]
    return [place for place in asked if place not in kept] + end, len(kept)
