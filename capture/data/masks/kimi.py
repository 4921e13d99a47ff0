"""Loss masks of Kimi conversations that come as token ids.

All of the family's chat templates write a turn as `<|im_ROLE|>NAME<|im_middle|>BODY<|im_end|>`, ROLE one of user, assistant
and system (tool results and declared tools are system turns under other names), with nothing between two turns. Each of these
marks is one token, so the turns can be told from the ids alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....models.errors import UsageError
from ..errors import RecordError
from .thinking import CLOSING, OPENING, without_thinking

_ASSISTANT, _OTHERS = "<|im_assistant|>", ("<|im_user|>", "<|im_system|>")
_MIDDLE, _END = "<|im_middle|>", "<|im_end|>"
_BETWEEN_TURNS = ("[BOS]", "[EOS]", "[EOT]", "[PAD]")

Ids = npt.NDArray[np.int64]


class KimiMasks:
    """Makes masks for ids of one tokenizer.

    `generation_prompt`: what the template writes to open the assistant's turn; what it has after the header (a `<think>`) is
    not the model's. Raises UsageError where the tokenizer lacks a mark of Kimi's turns.
    """

    def __init__(self, tokenizer: Any, generation_prompt: str = "") -> None:
        self._tokenizer = tokenizer
        known = tokenizer.get_added_vocab()
        missing = [mark for mark in (_ASSISTANT, *_OTHERS, _MIDDLE, _END) if mark not in known]
        if missing:
            raise UsageError(
                f"expected a Kimi tokenizer, which has {missing[0]} as one token; this one has not, so turns cannot be told "
                "from token ids; give rows a loss_mask, or read them as plain ids (--ids-format plain)"
            )
        self._marks = {known[mark]: mark for mark in (_ASSISTANT, *_OTHERS, _MIDDLE, _END)}
        self._between = {known[mark] for mark in _BETWEEN_TURNS if mark in known} - self._marks.keys()
        self._empty_thinking = [known[tag] for tag in (OPENING, CLOSING) if tag in known]
        prompt = tokenizer(generation_prompt.rpartition(_MIDDLE)[2], add_special_tokens=False, verbose=False)
        self._opened_with: list[int] = list(prompt["input_ids"]) if _MIDDLE in generation_prompt else []

    def mask(self, input_ids: npt.ArrayLike, think: str = "keep", last: bool = False) -> npt.NDArray[np.uint8]:
        """Return (S,) uint8: 1 at what the assistant writes, end mark included, of `input_ids` (S,).

        Thinking and tool calls are the assistant's; its headers, the generation prompt and an empty `<think></think>` at the
        start of a turn, which templates put in, are not. `think="mask"` takes out thinking as well, `last` all but the last turn.
        The last turn may be cut anywhere. Raises RecordError where the ids are no sequence of Kimi's turns.
        """
        ids = np.asarray(input_ids, np.int64)
        mask = np.zeros(len(ids), np.uint8)
        turns = [turn for turn in self._turns(ids) if turn.mark == _ASSISTANT]
        for turn in turns[-1:] if last else turns:
            mask[turn.body + self._put_in(ids[turn.body : turn.end]) : turn.end] = 1
        return without_thinking(self._tokenizer, ids, mask) if think == "mask" else mask

    def _turns(self, ids: Ids) -> Iterator["_Turn"]:
        marks = iter(np.flatnonzero(np.isin(ids, list(self._marks))).tolist())
        at = self._next_turn(ids, 0)
        while at < len(ids):
            opening = next(marks, None)
            if opening != at or self._marks[int(ids[at])] in (_MIDDLE, _END):
                raise self._unexpected(ids, at, "a token that opens a turn (" + ", ".join((*_OTHERS, _ASSISTANT)) + ")")
            middle = self._next_mark(ids, marks, _MIDDLE)
            end = self._next_mark(ids, marks, _END)
            yield _Turn(self._marks[int(ids[at])], min(middle + 1, len(ids)), min(end + 1, len(ids)))
            at = self._next_turn(ids, end + 1)

    def _next_turn(self, ids: Ids, at: int) -> int:
        while at < len(ids) and int(ids[at]) in self._between:
            at += 1
        return at

    def _next_mark(self, ids: Ids, marks: Iterator[int], expected: str) -> int:
        """Return the position of the next mark, or the length of the ids if there is none."""
        at = next(marks, len(ids))
        if at < len(ids) and self._marks[int(ids[at])] != expected:
            raise self._unexpected(ids, at, expected)
        return at

    def _put_in(self, body: Ids) -> int:
        """Tokens at the start of an assistant's body that the template wrote."""
        for written in (self._empty_thinking, self._opened_with):
            if written and body[: len(written)].tolist() == written:
                return len(written)
        return 0

    def _unexpected(self, ids: Ids, at: int, expected: str) -> RecordError:
        found = self._marks.get(int(ids[at]), f"id {ids[at]}")
        return RecordError(
            "no_kimi_turns", f"expected {expected} at token {at}, as Kimi's templates write turns; found {found}"
        )


@dataclass(frozen=True)
class _Turn:
    """`mark`: the token that opens it; `body`, `end`: the first token after the header, and one past the end mark."""

    mark: str
    body: int
    end: int
