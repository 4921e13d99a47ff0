"""Tool calls that a template writes outside the turn they belong to."""

from typing import Any

from .conversation import TOOL_CALL_FIELDS, Message
from .rendering import Rendering
from .row_error import RowError
from .shared_text import shared_before
from .substitution import Turns
from .template import ChatTemplate


def calls_outside_turns(template: ChatTemplate, rendering: Rendering, turns: Turns) -> bool:
    """Whether a tool call is rendered but lies outside its turn's span, so that it is not supervised.

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
        except RowError:
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
