"""Words of plain letters that stand in for the texts of a conversation, so that a rendering shows where each goes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .conversation import Message, content_text, reasoning_of, with_texts

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = 4


@dataclass(frozen=True)
class Markers:
    """Markers around a `stem` that occurs nowhere else; marker 2k stands for the content of message k, 2k+1 for its
    reasoning."""

    stem: str

    def content(self, place: int) -> str:
        """Stands for the content of a message."""
        return self._marker(2 * place)

    def reasoning(self, place: int) -> str:
        """Stands for the reasoning of a message."""
        return self._marker(2 * place + 1)

    @property
    def opening(self) -> str:
        """Return a word for the start of a marked block; its capitals keep it apart from the numbered ones."""
        return f"{self.stem}OPEN"

    @property
    def closing(self) -> str:
        """Return a word for the end of a marked block."""
        return f"{self.stem}CLOSE"

    @property
    def call(self) -> str:
        """Return a word for the name of a called function."""
        return f"{self.stem}CALL"

    def _marker(self, number: int) -> str:
        letters = ""
        for _ in range(_DIGITS):
            number, digit = divmod(number, len(_LETTERS))
            letters = _LETTERS[digit] + letters
        return f"{self.stem}{letters}"

    def in_place_of_all(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with a marker for every content and every reasoning that is there."""
        return [
            with_texts(
                message,
                self.content(place) if "content" in message else None,
                self.reasoning(place) if reasoning_of(message) else None,
            )
            for place, message in enumerate(messages)
        ]

    def found(self, rendered: str) -> list[tuple[int, int]]:
        """Yield every marker in a rendering, in order: its number and where it starts."""
        pattern = re.compile(rf"{self.stem}([a-z]{{{_DIGITS}}})")
        return [(_number(match[1]), match.start()) for match in pattern.finditer(rendered)]

    @property
    def length(self) -> int:
        """Characters of one marker."""
        return len(self.stem) + _DIGITS


def markers_for(messages: Sequence[Message], rendered: str) -> Markers:
    """Markers that occur neither in the rendering nor in any text of the messages."""
    texts = [rendered, *(content_text(message) or "" for message in messages), *map(reasoning_of, messages)]
    stem = "Hiddentapmark"
    while any(stem in text for text in texts):
        stem += "q"
    return Markers(stem)


def _number(letters: str) -> int:
    number = 0
    for letter in letters:
        number = number * len(_LETTERS) + _LETTERS.index(letter)
    return number
