"""The assistant's turns of a plain text that holds a chat in the template's own marks."""

import re
from collections.abc import Iterator
from functools import cached_property

from ..chat.template import ChatTemplate
from ..chat.text_diff import Span, atoms, common_atoms
from ..errors import BrokenTemplateError, RecordError

_ASKED, _ANSWERED, _NEXT = "hiddentapasked", "hiddentapanswered", "hiddentapnext"
# A thinking block that templates put in and models do not write.
_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


class TextTurns:
    """Finds turns by the tokens that one template opens and ends them with.

    Works for templates that open a turn with a token of the tokenizer's own and end it with one: a plain word could stand in any
    text. Whoever forges these tokens inside another turn of a text forges a turn, as they would for the model.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def holds(self, text: str) -> bool:
        """Return whether the text holds the opening of an assistant's turn."""
        return bool(self._header) and self._header in text

    def spans(self, text: str) -> list[Span] | None:
        """Return the characters that the assistant wrote, a span for each turn, its end mark included.

        None where the text holds no opening of a turn, or the template's turns cannot be told by tokens.
        """
        return list(self._spans(text)) if self._ends and self.holds(text) else None

    def _spans(self, text: str) -> Iterator[Span]:
        at = text.find(self._header)
        while at >= 0:
            start = at + len(self._header)
            if text.startswith(self._put_in, start):
                start += len(self._put_in)
            if empty := _EMPTY_THINKING.match(text, start):
                start = empty.end()
            ends = [found + len(mark) for mark in self._ends if (found := text.find(mark, start)) >= 0]
            end = min(ends, default=len(text))
            yield start, end
            at = text.find(self._header, end)

    @cached_property
    def _header(self) -> str:
        """What opens every turn of the assistant: the start of the generation prompt that answered turns have too."""
        prompt, before = self._template.generation_prompt(), self._between(_ASKED, _ANSWERED)
        first = next((atom for atom in atoms(prompt, self._added) if atom.strip()), "")
        at = before.rfind(first) if first in self._added else -1
        if at < 0:
            return ""
        prompt = prompt[prompt.index(first) :]
        return prompt[: common_atoms(prompt, before[at:], self._added)]

    @cached_property
    def _put_in(self) -> str:
        """Return the rest of the generation prompt, such as an opened thinking block: the model does not write it."""
        prompt = self._template.generation_prompt()
        return prompt[prompt.index(self._header) + len(self._header) :]

    @cached_property
    def _ends(self) -> set[str]:
        """Return the tokens that end a turn inside a conversation and at its end; empty where one of them is no such token."""
        tails = [self._between(_ANSWERED, _NEXT), self._after_last]
        marks = {next((atom for atom in atoms(tail, self._added) if atom.strip()), "") for tail in tails}
        return marks if marks <= set(self._added) and self._header and not marks & {self._header} else set()

    @property
    def _added(self) -> tuple[str, ...]:
        return self._template.added_tokens

    def _between(self, first: str, second: str) -> str:
        return self._probe.partition(first)[2].partition(second)[0]

    @cached_property
    def _probe(self) -> str:
        return self._rendered(_ASKED, _ANSWERED, _NEXT)

    @cached_property
    def _after_last(self) -> str:
        return self._rendered(_ASKED, _ANSWERED).partition(_ANSWERED)[2]

    def _rendered(self, *texts: str) -> str:
        roles = ("user", "assistant", "user")
        try:
            return self._template.render(
                [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            )
        except (RecordError, BrokenTemplateError):
            return ""
