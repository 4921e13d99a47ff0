"""The span of each assistant turn in a rendering, found by rendering the conversation with markers in its place."""

from dataclasses import dataclass

from ..chat.conversation import Message, content_text, reasoning_of, with_texts
from ..chat.rendering import Rendering
from ..chat.template import ChatTemplate
from ..chat.text_diff import Span, only_tags, shared_after, shared_before, whole_text
from ..errors import RecordError
from .alignment import Alignment, align
from .turn_end import TurnEnds

_REMEDY = "use a template with {% generation %} marks, or supervise everything (--loss-on all)"


@dataclass(frozen=True)
class Turns:
    """`spans`: characters of the full rendering that the assistant wrote, one span per assistant turn in order.
    `changed`: whether the template changed or dropped part of a content."""

    spans: tuple[Span, ...]
    changed: bool


class TurnFinder:
    """Finds assistant turns, end-of-turn marks included, for one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._ends = TurnEnds(template)

    def turns(self, rendering: Rendering) -> Turns:
        """Return the turns of a conversation.

        Where the full rendering is the marked one with the texts put back, character by character, one rendering has
        shown all turns. Else each turn is looked for alone. Raises RecordError where a turn cannot be told.
        """
        places = rendering.conversation.assistant_turns
        aligned = align(rendering)
        if aligned is not None:
            return Turns(tuple(self._aligned_turn(rendering, aligned, place) for place in places), changed=False)
        found = [self._turn(rendering, place) for place in places]
        return Turns(tuple(span for span, _ in found), any(changed for _, changed in found))

    def _aligned_turn(self, rendering: Rendering, aligned: Alignment, place: int) -> Span:
        content, reasoning = aligned.spans[2 * place], aligned.spans.get(2 * place + 1)
        gap = rendering.text[content[1] : aligned.next_start[2 * place]]
        end = content[1] + self._ends.length_in_gap(rendering, place, gap)
        return self._start(rendering, place, content, reasoning), end

    def _turn(self, rendering: Rendering, place: int) -> tuple[Span, bool]:
        """Return the span of one turn, and whether a text of it is not rendered as it stands."""
        message, markers = rendering.conversation.messages[place], rendering.markers
        replaced = with_texts(message, content=markers.content(place))
        content = self._located(rendering, place, replaced, markers.content(place))
        if content is None:
            raise _not_once(place, 0)
        content, changed = whole_text(rendering.text, content, content_text(message))
        reasoning = None
        if reasoning_of(message):
            replaced = with_texts(message, reasoning=markers.reasoning(place))
            reasoning = self._located(rendering, place, replaced, markers.reasoning(place))
        if reasoning is not None:
            reasoning, reasoning_changed = whole_text(rendering.text, reasoning, reasoning_of(message))
            changed = changed or reasoning_changed
        end = content[1] + self._ends.length(rendering, place, rendering.text[content[1] :])
        return (self._start(rendering, place, content, reasoning), end), changed

    def _located(self, rendering: Rendering, place: int, replaced: Message, marker: str) -> Span | None:
        """Return the characters of the rendering that a marker takes the place of, None where it is not rendered at all."""
        text, conversation = rendering.text, rendering.conversation
        marked = self._template.render(conversation.with_message(place, replaced), conversation.tools)
        count = marked.count(marker)
        if count == 0:
            return None
        if count > 1:
            raise _not_once(place, count)
        at = marked.index(marker)
        before = min(at, shared_before(text, marked))
        after = min(len(marked) - at - len(marker), shared_after(text, marked))
        self._require_only_tags(place, marked[before:at] + marked[at + len(marker) : len(marked) - after])
        return before, max(before, len(text) - after)

    def _require_only_tags(self, place: int, rest: str) -> None:
        """Beside the marker itself only an (emptied) think block may have changed."""
        if not only_tags(rest, self._template.added_tokens):
            raise RecordError(
                "turn_not_found",
                f"expected message {place} to change the rendering in its own place only; "
                f"found a change in {rest[:60]!r} too; {_REMEDY}",
            )

    def _start(self, rendering: Rendering, place: int, content: Span, reasoning: Span | None) -> int:
        """Return where the model starts to write.

        That is never inside the generation prompt; a row's own thinking starts at its opening tag.
        """
        start = content[0] if reasoning is None else min(content[0], reasoning[0])
        text, prompt = rendering.text, self._template.generation_prompt(rendering.conversation.tools)
        if not prompt:
            return start
        opened = text.rfind(prompt, 0, start)
        tag = text[opened + len(prompt) : start].strip() if opened >= 0 else ""
        if 0 < len(tag) <= 64 and len(tag.split()) == 1 and not tag.startswith(("</", "[/")):
            of_the_row = reasoning is not None or tag in (content_text(rendering.conversation.messages[place]) or "")
            return opened + len(prompt) if of_the_row else start
        across = text.find(prompt, max(0, start - len(prompt) + 1), start - 1 + len(prompt))
        return start if across < 0 else across + len(prompt)


def _not_once(place: int, count: int) -> RecordError:
    return RecordError(
        "marker_not_unique",
        f"expected the template to render the content of message {place} once; found it {count} times; {_REMEDY}",
    )
