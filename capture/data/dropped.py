"""Parts of a conversation that the template does not render."""

from collections.abc import Callable

from .conversation import REASONING_FIELDS, TOOL_CALL_FIELDS, Conversation, Message
from .markers import Markers
from .row_error import RowError
from .template import ChatTemplate


def dropped_parts(
    template: ChatTemplate, conversation: Conversation, rendered: str, marked: str | None, markers: Markers
) -> frozenset[str]:
    """Warning codes for tools, tool calls, reasoning and whole messages that leave no trace in the rendering.

    Tools, calls and reasoning are taken out one by one and the conversation rendered again: equal text means the
    template does not show them. `marked` is the rendering with markers for all texts, None where that failed.
    """
    found = {
        code
        for fields, code in ((TOOL_CALL_FIELDS, "tool_calls_dropped"), (REASONING_FIELDS, "reasoning_dropped"))
        for place, message in enumerate(conversation.messages)
        if any(message.get(field) for field in fields)
        and _same_without(fields, template, conversation, place, rendered)
    }
    if conversation.tools and _renders_as(rendered, lambda: template.render(conversation.messages, None)):
        found.add("tools_dropped")
    if marked is not None and _unrendered_message(conversation, rendered, marked, markers):
        found.add("message_dropped")
    return frozenset(found)


def _same_without(
    fields: tuple[str, ...], template: ChatTemplate, conversation: Conversation, place: int, rendered: str
) -> bool:
    messages = list(conversation.messages)
    messages[place] = _without(messages[place], fields)
    return _renders_as(rendered, lambda: template.render(messages, conversation.tools))


def _without(message: Message, fields: tuple[str, ...]) -> Message:
    return {field: value for field, value in message.items() if field not in fields}


def _renders_as(rendered: str, render: Callable[[], str]) -> bool:
    try:
        return render() == rendered
    except RowError:
        # A template that refuses the conversation without the part has looked at it.
        return False


def _unrendered_message(conversation: Conversation, rendered: str, marked: str, markers: Markers) -> bool:
    seen = {number // 2 for number, _ in markers.found(marked)}
    texts = ((place, message.get("content", "").strip()) for place, message in enumerate(conversation.messages))
    return any(place not in seen and text and text not in rendered for place, text in texts)
