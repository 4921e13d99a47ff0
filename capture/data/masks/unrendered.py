"""Parts of a conversation that the template drops, or writes outside the turn they belong to."""

from collections.abc import Callable
from typing import Any

from ..chat.conversation import REASONING_FIELDS, TOOL_CALL_FIELDS, Conversation, Message, content_text
from ..chat.rendering import Rendering
from ..chat.template import ChatTemplate
from ..chat.text_diff import shared_before
from ..errors import RecordError
from .substitution import Turns

DROPPED_CODES = ("message_dropped", "reasoning_dropped", "tool_calls_dropped", "tools_dropped")


def dropped_parts(template: ChatTemplate, rendering: Rendering) -> frozenset[str]:
    """Warning codes for tools, tool calls, reasoning and whole messages that leave no trace in the rendering.

    Tools, calls and reasoning are taken out one by one and the conversation rendered again: equal text means the
    template does not show them.
    """
    conversation = rendering.conversation
    calls, thoughts = (
        [
            place
            for place, message in enumerate(conversation.messages)
            if any(message.get(field) for field in fields) and _same_without(fields, template, rendering, place)
        ]
        for fields in (TOOL_CALL_FIELDS, REASONING_FIELDS)
    )
    found = {"tool_calls_dropped"} if calls else set()
    for place in thoughts:
        last = _shows_in_last_turn(template, conversation, place)
        found.add("earlier_reasoning_dropped" if last else "reasoning_dropped")
    if conversation.tools and _renders_as(rendering.text, lambda: template.render(conversation.messages, None)):
        found.add("tools_dropped")
    if _has_unrendered_message(rendering):
        found.add("message_dropped")
    return frozenset(found)


def _same_without(fields: tuple[str, ...], template: ChatTemplate, rendering: Rendering, place: int) -> bool:
    conversation = rendering.conversation
    messages = conversation.with_message(place, _without(conversation.messages[place], fields))
    return _renders_as(rendering.text, lambda: template.render(messages, conversation.tools))


def _shows_in_last_turn(template: ChatTemplate, conversation: Conversation, place: int) -> bool:
    """Return whether the template shows the reasoning of message `place` where that is the last turn.

    Such a template leaves out the reasoning of earlier turns by design, as the model is run.
    """
    before, message = list(conversation.messages[:place]), conversation.messages[place]
    if place == len(conversation.messages) - 1:
        return False
    try:
        shown = template.render([*before, message], conversation.tools)
    except RecordError:
        return False
    return not _renders_as(
        shown, lambda: template.render([*before, _without(message, REASONING_FIELDS)], conversation.tools)
    )


def _without(message: Message, fields: tuple[str, ...]) -> Message:
    return {field: value for field, value in message.items() if field not in fields}


def _renders_as(rendered: str, render: Callable[[], str]) -> bool:
    try:
        return render() == rendered
    except RecordError:
        # A template that refuses the conversation without the part has looked at it.
        return False


def _has_unrendered_message(rendering: Rendering) -> bool:
    if rendering.marked is None:
        return False
    seen = {number // 2 for number, _ in rendering.markers.found(rendering.marked)}
    texts = enumerate((content_text(message) or "").strip() for message in rendering.conversation.messages)
    return any(place not in seen and text and text not in rendering.text for place, text in texts)


def calls_outside_turns(template: ChatTemplate, rendering: Rendering, turns: Turns) -> bool:
    """Return whether a tool call is rendered but lies outside its turn's span, so that it is not supervised.

    Some templates write calls ahead of the content, with the tools' answers in between. A call is found by rendering
    the conversation once more with another function name.
    """
    conversation = rendering.conversation
    for place, span in zip(conversation.assistant_turns, turns.spans, strict=True):
        message = conversation.messages[place]
        if not any(message.get(field) for field in TOOL_CALL_FIELDS):
            continue
        renamed = conversation.with_message(place, _renamed(message, rendering.markers.call))
        try:
            marked = template.render(renamed, conversation.tools)
        except RecordError:
            continue
        at = min(marked.find(rendering.markers.call), shared_before(rendering.text, marked))
        if at >= 0 and not span[0] <= at < span[1]:
            return True
    return False


def _renamed(message: Message, name: str) -> Message:
    return message | {field: _with_names(message[field], name) for field in TOOL_CALL_FIELDS if message.get(field)}


def _with_names(value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return [_with_names(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: name if key == "name" else _with_names(item, name) if key == "function" else item
        for key, item in value.items()
    }
