"""Parts of a conversation that the template does not render."""

from collections.abc import Callable

from .conversation import REASONING_FIELDS, TOOL_CALL_FIELDS, Message, content_text
from .rendering import Rendering
from .row_error import RowError
from .template import ChatTemplate


def dropped_parts(template: ChatTemplate, rendering: Rendering) -> frozenset[str]:
    """Warning codes for tools, tool calls, reasoning and whole messages that leave no trace in the rendering.

    Tools, calls and reasoning are taken out one by one and the conversation rendered again: equal text means the
    template does not show them.
    """
    conversation = rendering.conversation
    found = {
        code
        for fields, code in ((TOOL_CALL_FIELDS, "tool_calls_dropped"), (REASONING_FIELDS, "reasoning_dropped"))
        for place, message in enumerate(conversation.messages)
        if any(message.get(field) for field in fields) and _same_without(fields, template, rendering, place)
    }
    if conversation.tools and _renders_as(rendering.text, lambda: template.render(conversation.messages, None)):
        found.add("tools_dropped")
    if _has_unrendered_message(rendering):
        found.add("message_dropped")
    return frozenset(found)


def _same_without(fields: tuple[str, ...], template: ChatTemplate, rendering: Rendering, place: int) -> bool:
    conversation = rendering.conversation
    messages = conversation.with_message(place, _without(conversation.messages[place], fields))
    return _renders_as(rendering.text, lambda: template.render(messages, conversation.tools))


def _without(message: Message, fields: tuple[str, ...]) -> Message:
    return {field: value for field, value in message.items() if field not in fields}


def _renders_as(rendered: str, render: Callable[[], str]) -> bool:
    try:
        return render() == rendered
    except RowError:
        # A template that refuses the conversation without the part has looked at it.
        return False


def _has_unrendered_message(rendering: Rendering) -> bool:
    if rendering.marked is None:
        return False
    seen = {number // 2 for number, _ in rendering.markers.found(rendering.marked)}
    texts = enumerate((content_text(message) or "").strip() for message in rendering.conversation.messages)
    return any(place not in seen and text and text not in rendering.text for place, text in texts)
