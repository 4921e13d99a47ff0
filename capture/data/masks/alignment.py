"""All texts of a conversation found in its rendering at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..chat.conversation import Message, content_text, reasoning_of
from ..chat.rendering import Rendering
from ..chat.text_diff import Span


@dataclass(frozen=True)
class Alignment:
    """`spans`: where each numbered text stands in the full rendering; `next_start`: where the text after it starts."""

    spans: dict[int, Span]
    next_start: dict[int, int]


def align(rendering: Rendering) -> Alignment | None:
    """Return the place of each text, if the marked rendering with the texts put back equals the full one.

    None where that differs in a single character, or where the content of an assistant is not there exactly once, right
    after its reasoning.
    """
    conversation, rendered, marked, markers = (
        rendering.conversation,
        rendering.text,
        rendering.marked,
        rendering.markers,
    )
    if marked is None:
        return None
    texts = _numbered_texts(conversation.messages)
    spans: dict[int, Span] = {}
    at = read = 0
    for number, start in markers.found(marked):
        gap = marked[read:start]
        if number in spans or not rendered.startswith(gap + texts[number], at):
            return None
        spans[number] = (at + len(gap), at + len(gap) + len(texts[number]))
        at, read = spans[number][1], start + markers.length
    if rendered[at:] != marked[read:] or any(2 * place not in spans for place in conversation.assistant_turns):
        return None
    order = list(spans)
    if any(
        2 * k + 1 in spans and order.index(2 * k) - order.index(2 * k + 1) != 1 for k in conversation.assistant_turns
    ):
        return None
    starts = [spans[number][0] for number in order[1:]]
    return Alignment(spans, dict(zip(order, [*starts, len(rendered)], strict=True)))


def _numbered_texts(messages: Sequence[Message]) -> dict[int, str]:
    contents = {2 * place: content_text(message) or "" for place, message in enumerate(messages)}
    return contents | {2 * place + 1: reasoning_of(message) for place, message in enumerate(messages)}
