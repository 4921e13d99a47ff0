"""Turns that were written anew, and the sample that they make of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..data.chat.conversation import Message
from .engine import Answer


@dataclass(frozen=True)
class WrittenTurn:
    """A turn that was written anew: the place of its message, the tokens it went on from, and the answer."""

    place: int
    prompt_ids: tuple[int, ...]
    answer: Answer


@dataclass(frozen=True)
class WrittenSample:
    """A record whose answers are written.

    Attributes:
        input_ids: (S,) the last prompt and the answer behind it, each token once.
        loss_mask: (S,) 1 on the tokens that the model wrote.
        messages: of a conversation, with its new turns; None of a text or of ids.
        text: the same of a text: prompt and answer.
        turns: of every new turn the place of its message, why it ended, the end mark that it wrote, its tokens, and how many of
            them are supervised.
        kept: turns that stayed as they were. left_out: turns that were too long to ask for.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    messages: tuple[Message, ...] | None
    tools: tuple[dict[str, Any], ...] | None
    text: str | None
    turns: tuple[dict[str, Any], ...]
    kept: int
    left_out: int
