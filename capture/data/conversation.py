"""Conversations: one table of roles, one shape of messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .row_error import RowError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TOOL_CALL_FIELDS = ("tool_calls", "function_call")

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`messages` as a chat template takes them: `role` from the table above, `content` a string (absent only where an
    assistant has tool calls or reasoning instead), other fields of the row untouched, null fields left out.
    In a conversation with images, a content that the row gives as parts stays a list of text and image parts; an
    assistant's is one text part. `tools` are JSON schemas, or None."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None

    @property
    def assistant_turns(self) -> list[int]:
        """The places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def images(self) -> list[tuple[int, Message]]:
        """The image parts in order, each with the place of its message."""
        contents = ((place, message.get("content")) for place, message in enumerate(self.messages))
        return [(k, part) for k, parts in contents if isinstance(parts, list) for part in parts if _is_image(part)]

    def with_message(self, place: int, message: Message) -> list[Message]:
        """The messages with one of them replaced."""
        return [*self.messages[:place], message, *self.messages[place + 1 :]]


def reasoning_of(message: Message) -> str:
    """The reasoning text of a message, or an empty string."""
    return next((message[field] for field in REASONING_FIELDS if message.get(field)), "")


def content_text(message: Message) -> str | None:
    """The text of a message, the first one of several parts; None where there is no content."""
    content = message.get("content")
    if isinstance(content, list):
        return next((str(part["text"]) for part in content if not _is_image(part)), "")
    return content


def content_like(message: Message, text: str) -> str | list[dict[str, Any]]:
    """`text` as content in the form that the message has, for templates that take parts alone."""
    return [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text


def with_texts(message: Message, content: str | None = None, reasoning: str | None = None) -> Message:
    """A copy of the message with its content, its reasoning fields or both replaced; None leaves a text as it is."""
    changed = dict(message)
    if content is not None:
        changed["content"] = _with_first_text(message.get("content"), content)
    if reasoning is not None:
        changed |= {field: reasoning for field in REASONING_FIELDS if message.get(field)}
    return changed


def _with_first_text(content: object, text: str) -> str | list[Any]:
    if not isinstance(content, list):
        return text
    first = next((at for at, part in enumerate(content) if not _is_image(part)), None)
    return [part if at != first else part | {"text": text} for at, part in enumerate(content)]


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def read_conversation(messages: object, tools: object, *, take_images: bool = False) -> Conversation:
    """The conversation of a row's `messages` or `conversations`.

    Raises RowError for no messages, an unknown role, content that is no text (nor an image, with `take_images`), and tools
    that are no list of objects.
    """
    if not isinstance(messages, list | tuple):
        raise RowError("bad_message", f"expected a list of messages; found a {type(messages).__name__}")
    if not messages:
        raise RowError("empty_conversation", "expected at least one message; found none")
    keep_parts = take_images and any(map(_holds_image, messages))
    read = (_message(place, value, keep_parts) for place, value in enumerate(messages))
    return Conversation(tuple(read), _tools(tools))


def _holds_image(message: object) -> bool:
    content = (message.get("content") or message.get("value")) if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(_is_image, content))


def _message(place: int, value: object, keep_parts: bool) -> Message:
    if not isinstance(value, Mapping):
        raise RowError("bad_message", f"expected message {place} to be an object; found a {type(value).__name__}")
    fields = {key: item for key, item in value.items() if item is not None}
    role = _role(place, fields.pop("role" if "role" in fields else "from", None))
    content = fields.pop("content" if "content" in fields else "value", None)
    for field in REASONING_FIELDS:
        if not isinstance(fields.get(field, ""), str):
            raise RowError("bad_content", f"expected {field} of message {place} to be a string")
    return {"role": role, **_content(place, role, content, fields, keep_parts), **fields}


def _role(place: int, value: object) -> str:
    if value is None:
        raise RowError("bad_message", f"expected message {place} to have a role (or from); found none")
    role = ROLES.get(value.lower()) if isinstance(value, str) else None
    if role is None:
        raise RowError("unknown_role", f"expected a role of {', '.join(ROLES)}; found {value!r} in message {place}")
    return role


def _content(place: int, role: str, value: object, fields: Mapping[str, Any], keep_parts: bool) -> dict[str, Any]:
    if isinstance(value, str):
        return {"content": value}
    if isinstance(value, list | tuple) and value and keep_parts:
        return {"content": _parts(place, role, value)}
    if isinstance(value, list | tuple) and value:
        return {"content": "".join(_part(place, part) for part in value)}
    stands_alone = any(fields.get(field) for field in (*TOOL_CALL_FIELDS, *REASONING_FIELDS))
    if value is None and role == "assistant" and stands_alone:
        return {}
    found = "none" if value is None else f"a {type(value).__name__}" if value else f"an empty {type(value).__name__}"
    raise RowError("bad_content", f"expected the content of message {place} to be text; found {found}")


def _parts(place: int, role: str, parts: list[Any] | tuple[Any, ...]) -> list[dict[str, Any]]:
    if role == "assistant":
        return [{"type": "text", "text": "".join(_part(place, part) for part in parts)}]
    return [dict(part) if _is_image(part) else {"type": "text", "text": _part(place, part)} for part in parts]


def _part(place: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", "no type") if isinstance(part, Mapping) else type(part).__name__
    raise RowError("bad_content", f"expected text parts in the content of message {place}; found a part of {kind!r}")


def _tools(value: object) -> tuple[dict[str, Any], ...] | None:
    if isinstance(value, str):
        # Tables cannot hold free-form schemas, so many datasets keep them as JSON text.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_tools", f"expected tools to be a JSON list; found {error}") from error
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("bad_tools", f"expected tools to be a list of objects; found a {type(value).__name__}")
    return tuple(value) or None
