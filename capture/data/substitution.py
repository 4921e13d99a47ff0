"""Where each assistant turn stands in a rendering, found by rendering the conversation with markers in its place."""

import re
from dataclasses import dataclass

from .alignment import Alignment, align
from .conversation import Conversation, Message, reasoning_of, with_texts
from .markers import Markers
from .row_error import RowError
from .shared_text import shared_after, shared_before, whole_text
from .template import ChatTemplate, Span
from .turn_end import TurnEnds

_REMEDY = "use a template with {% generation %} marks, or supervise everything (--loss-on all)"


@dataclass(frozen=True)
class Turns:
    """`spans`: characters of the full rendering that the assistant wrote, in order.
    `changed`: whether the template changed or dropped part of a content."""

    spans: tuple[Span, ...]
    changed: bool


class TurnFinder:
    """Finds assistant turns, end-of-turn marks included, for one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._ends = TurnEnds(template)

    def turns(self, conversation: Conversation, rendered: str, marked: str | None, markers: Markers) -> Turns:
        """The turns of a conversation. `marked` is its rendering with every text replaced, None where that failed.

        Where the full rendering is the marked one with the texts put back, character by character, one rendering has
        shown all turns. Else each turn is looked for alone. Raises RowError where a turn cannot be told.
        """
        spans = align(conversation, rendered, marked, markers) if marked is not None else None
        if spans is None:
            return self._one_by_one(conversation, rendered, markers)
        return Turns(
            tuple(
                self._aligned_turn(conversation, rendered, spans, place, markers)
                for place in conversation.assistant_turns
            ),
            changed=False,
        )

    def _aligned_turn(
        self, conversation: Conversation, rendered: str, aligned: Alignment, place: int, markers: Markers
    ) -> Span:
        content, reasoning = aligned.spans[2 * place], aligned.spans.get(2 * place + 1)
        gap = rendered[content[1] : aligned.next_start[2 * place]]
        end = content[1] + self._ends.length_in_gap(conversation, place, gap, markers)
        return self._start(conversation, rendered, content, reasoning), end

    def _one_by_one(self, conversation: Conversation, rendered: str, markers: Markers) -> Turns:
        found = [self._turn(conversation, rendered, place, markers) for place in conversation.assistant_turns]
        return Turns(tuple(span for span, _ in found), any(changed for _, changed in found))

    def _turn(self, conversation: Conversation, rendered: str, place: int, markers: Markers) -> tuple[Span, bool]:
        message = conversation.messages[place]
        content = self._located(
            conversation, rendered, place, with_texts(message, content=markers.content(place)), markers.content(place)
        )
        if content is None:
            raise _not_once(place, 0)
        reasoning = None
        if reasoning_of(message):
            reasoning = self._located(
                conversation,
                rendered,
                place,
                with_texts(message, reasoning=markers.reasoning(place)),
                markers.reasoning(place),
            )
        content, changed = whole_text(rendered, content, message.get("content"))
        if reasoning is not None:
            reasoning, reasoning_changed = whole_text(rendered, reasoning, reasoning_of(message))
            changed = changed or reasoning_changed
        end = content[1] + self._ends.length(conversation, place, rendered[content[1] :], markers)
        return (self._start(conversation, rendered, content, reasoning), end), changed

    def _located(
        self, conversation: Conversation, rendered: str, place: int, replaced: Message, marker: str
    ) -> Span | None:
        """The characters of the rendering that a marker takes the place of, None where it is not rendered at all."""
        messages = [*conversation.messages[:place], replaced, *conversation.messages[place + 1 :]]
        marked = self._template.render(messages, conversation.tools)
        count = marked.count(marker)
        if count == 0:
            return None
        if count > 1:
            raise _not_once(place, count)
        at = marked.index(marker)
        before = min(at, shared_before(rendered, marked))
        after = min(len(marked) - at - len(marker), shared_after(rendered, marked))
        rest = marked[before:at] + marked[at + len(marker) : len(marked) - after]
        if not self._only_tags(rest):
            raise RowError(
                "turn_not_found",
                f"expected message {place} to change the rendering in its own place only; "
                f"found a change in {rest[:60]!r} too; {_REMEDY}",
            )
        return before, max(before, len(rendered) - after)

    def _only_tags(self, text: str) -> bool:
        for token in self._template.added_tokens:
            text = text.replace(token, "")
        return re.fullmatch(r"(\s|<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\])*", text) is not None

    def _start(self, conversation: Conversation, rendered: str, content: Span, reasoning: Span | None) -> int:
        """Where the model starts to write: never inside what the generation prompt renders."""
        start = content[0] if reasoning is None else min(content[0], reasoning[0])
        prompt = self._template.generation_prompt(conversation.tools)
        if not prompt:
            return start
        if reasoning is not None:
            opened = rendered.rfind(prompt, 0, start)
            if opened >= 0 and re.fullmatch(r"\s*\S{1,64}\s*", rendered[opened + len(prompt) : start]):
                return opened + len(prompt)
        across = rendered.find(prompt, max(0, start - len(prompt) + 1), start - 1 + len(prompt))
        return start if across < 0 else across + len(prompt)


def _not_once(place: int, count: int) -> RowError:
    return RowError(
        "marker_not_unique",
        f"expected the template to render the content of message {place} once; found it {count} times; {_REMEDY}",
    )
