"""The loss mask of a conversation, by one of three rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....models.errors import UsageError
from ..chat.conversation import TOOL_CALL_FIELDS, Conversation, content_text, reasoning_of
from ..chat.rendering import Rendering
from ..chat.template import ChatTemplate, Tools
from ..chat.text_diff import Span, only_tags
from ..errors import RecordError
from .generation_marks import has_marks, marked_spans
from .substitution import TurnFinder
from .unrendered import calls_outside_turns


@dataclass(frozen=True, eq=False)
class TokenMask:
    """`loss_mask`: (S,) uint8. `straddled`: tokens that lie across an edge of a span and are left out."""

    loss_mask: npt.NDArray[np.uint8]
    straddled: int


def mask_of_spans(text: str, offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> TokenMask:
    """Marks each token that starts inside a span.

    `offsets`: (S, 2) int64, first character of each token and one past its last, in `text`.
    A token that starts before a span holds characters the model does not write there: left out, and counted. One that
    reaches past the end is kept where the rest is white space (a mark that swallows its newline), else left out too.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), np.uint8)
    straddled = 0
    for start, end in spans:
        inside = (starts >= start) & (starts < end)
        over = [int(row) for row in np.flatnonzero(inside & (ends > end)) if text[end : ends[row]].strip()]
        inside[over] = False
        mask[inside] = 1
        straddled += len(over) + int(((starts < start) & (ends > start)).sum())
    return TokenMask(mask, straddled)


GENERATION_MARKS, SUBSTITUTION, ALL = "generation_marks", "substitution", "all"
ROW, KIMI_TOKENS, COMPLETION, TEXT_TURNS = "row", "kimi_tokens", "completion", "text_turns"
_NO_OFFSETS = (
    "expected a tokenizer that tells the characters of each token (a fast one); this one does not, so assistant turns "
    "cannot be marked; use its fast version, or supervise everything (--loss-on all)"
)


@dataclass(frozen=True, eq=False)
class Masked:
    """`loss_mask`: (S,) uint8, unshifted; the rule that made it; short warning codes."""

    loss_mask: npt.NDArray[np.uint8]
    rule: str
    warnings: frozenset[str]


def mask_of_text(
    text: str, spans: Sequence[Span], offsets: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.uint8], frozenset[str]]:
    """Return (S,) uint8, 1 at the tokens of `spans`, and warning codes; raise UsageError without offsets."""
    if offsets is None:
        raise UsageError(_NO_OFFSETS)
    made = mask_of_spans(text, offsets, spans)
    return made.loss_mask, frozenset({"token_straddles_span"} if made.straddled else ())


class LossMasks:
    """Makes masks for one template. `loss_on` is `assistant`, `last` or `all`."""

    def __init__(self, template: ChatTemplate, loss_on: str) -> None:
        self._template = template
        self._loss_on = loss_on
        self._finder = TurnFinder(template)

    def rule(self, tools: Tools = None) -> str:
        """Return the rule that holds for conversations with or without tools."""
        return ALL if self._loss_on == "all" else self._turn_rule(tools)

    def mask(self, rendering: Rendering, tokens: int, offsets: npt.NDArray[np.int64] | None) -> Masked:
        """Return the mask over the S `tokens` of a conversation, without the turns that the record leaves out.

        `offsets`: (S, 2) int64, characters of each token; None where the tokenizer cannot tell.
        Raises RecordError where the rule cannot tell the turns, UsageError where it needs offsets and there are none.
        """
        conversation = rendering.conversation
        if conversation.token_mask is not None:
            return Masked(_given_mask(conversation, tokens), ROW, frozenset())
        rule = self.rule(conversation.tools)
        if rule == ALL and False not in conversation.marks:
            return Masked(np.ones(tokens, np.uint8), rule, frozenset())
        kept = _kept_turns(conversation, self._loss_on)
        if offsets is None:
            raise UsageError(_NO_OFFSETS)
        turns, warnings = self._turns(rendering)
        if rule == ALL:
            left = np.ones(tokens, np.uint8)
            for start, end in (span for place, span in turns if place not in kept):
                left[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = 0
            return Masked(left, rule, warnings)
        if None not in kept and any(place is None for place, _ in turns):
            raise RecordError(
                "turn_not_found",
                "expected each of the template's generation marks to cover one message, since some turns are left out; found one "
                "that does not; use a template that marks each turn alone",
            )
        spans = [(place, span) for place, span in turns if place in kept]
        said = [span for place, span in spans if not self._says_nothing(rendering, place, span)]
        token_mask = mask_of_spans(rendering.text, offsets, said)
        found = (("token_straddles_span", token_mask.straddled), ("empty_turn", len(said) < len(spans)))
        return Masked(token_mask.loss_mask, rule, warnings | {code for code, holds in found if holds})

    def turns(self, rendering: Rendering) -> list[tuple[int | None, Span]]:
        """Return where each assistant turn is in the rendering, by the place of its message; raises RecordError as `mask`."""
        return self._turns(rendering)[0]

    def _turn_rule(self, tools: Tools) -> str:
        return GENERATION_MARKS if has_marks(self._template.source(tools)) else SUBSTITUTION

    def _turns(self, rendering: Rendering) -> tuple[list[tuple[int | None, Span]], frozenset[str]]:
        """Return the span of each assistant turn in the rendering, by the index of its message."""
        conversation = rendering.conversation
        if self._turn_rule(conversation.tools) == GENERATION_MARKS:
            return list(marked_spans(self._template, rendering)), frozenset()
        turns = self._finder.turns(rendering)
        outside = calls_outside_turns(self._template, rendering, turns)
        found = (("content_changed", turns.changed), ("tool_calls_not_supervised", outside))
        warnings = frozenset(code for code, holds in found if holds)
        return list(zip(conversation.assistant_turns, turns.spans, strict=True)), warnings

    def _says_nothing(self, rendering: Rendering, place: int | None, span: Span) -> bool:
        """Return whether the template dropped the whole text of a turn: its end mark alone would teach empty answers.

        An answer that is empty in the record itself keeps its end mark.
        """
        if place is None:
            return False
        message, text = rendering.conversation.messages[place], rendering.text[slice(*span)]
        texts = [one.strip() for one in (content_text(message) or "", reasoning_of(message)) if one.strip()]
        calls = any(message.get(name) for name in TOOL_CALL_FIELDS)
        if not (texts or calls) or any(one in text for one in texts):
            return False
        return only_tags(text, self._template.added_tokens)


def _kept_turns(conversation: Conversation, loss_on: str) -> set[int | None]:
    """Return the places of the turns that are supervised; None among them where all of the assistant's are.

    Raises RecordError for a mark that asks for a turn of another role, or leaves one out of a mask over everything.
    """
    turns, marks = conversation.assistant_turns, conversation.marks
    wrong = loss_on != "all"
    for place, mark in enumerate(marks):
        if mark is wrong and place not in turns:
            role = conversation.messages[place]["role"]
            raise RecordError(
                "bad_mark",
                f"expected marks of the assistant's turns; found {int(wrong)} for message {place}, of role {role}"
                + ("; supervise everything (--loss-on all), or take the mark out" if wrong else ""),
            )
    chosen = turns[-1:] if loss_on == "last" else turns
    kept: set[int | None] = {place for place in chosen if not marks or marks[place] is not False}
    return kept | {None} if len(kept) == len(turns) else kept


def _given_mask(conversation: Conversation, tokens: int) -> npt.NDArray[np.uint8]:
    mask = conversation.token_mask or ()
    if len(mask) != tokens:
        raise RecordError(
            "bad_loss_mask",
            f"expected loss_mask as long as the messages ({len(conversation.messages)}) or their tokens ({tokens}); found "
            f"{len(mask)}",
        )
    return np.asarray(mask, np.uint8)
