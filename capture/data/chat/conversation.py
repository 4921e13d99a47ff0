"""Conversations: one table of roles, one shape of messages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RecordError
from ..records.given_ids import read_mask

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
# Whether a turn is trained, in the words of OpenAI, ms-swift, axolotl, LLaMA-Factory and our own shards.
MARK_FIELDS = ("weight", "loss", "train", "trainable", "loss_mask")
_OWN_FIELDS = frozenset(("role", "content", *REASONING_FIELDS, *TOOL_CALL_FIELDS))

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`messages` as a chat template takes them: `role` from the table above, `content` a string (absent only where an
    assistant has tool calls or reasoning instead), other fields of the row untouched, null fields left out.
    In a conversation with images, a content that the row gives as parts stays a list of text and image parts; an
    assistant's is one text part. `tools` are JSON schemas, or None. `template_args`: the record's own, over the run's.
    `marks`: per message whether the record leaves it out (False) or trains it (True), None where it does not say.
    `token_mask`: the record's own mask over the tokens of its rendering."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    marks: tuple[bool | None, ...] = ()
    token_mask: tuple[int, ...] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def assistant_turns(self) -> list[int]:
        """Return the places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def images(self) -> list[tuple[int, Message]]:
        """Return the image parts in order, each with the place of its message."""
        contents = ((place, message.get("content")) for place, message in enumerate(self.messages))
        return [(k, part) for k, parts in contents if isinstance(parts, list) for part in parts if _is_image(part)]

    @property
    def message_fields(self) -> set[str]:
        """Return the names that the messages have beside role, content, reasoning and tool calls."""
        return {name for message in self.messages for name in message} - _OWN_FIELDS

    def left_out(self, places: Collection[int]) -> "Conversation":
        """Return the conversation with the assistant's turns among `places` left out of the mask."""
        turns = set(places).intersection(self.assistant_turns)
        return replace(self, marks=tuple(False if k in turns else mark for k, mark in enumerate(self.marks)))

    def masked(self, value: object) -> "Conversation":
        """Return the conversation with a mask of 0 and 1 over its messages, or else over its tokens."""
        mask = read_mask("loss_mask", value)
        if len(mask) != len(self.messages):
            return replace(self, token_mask=mask)
        pairs = [(mark, bool(given)) for mark, given in zip(self.marks, mask, strict=True)]
        wrong = next((k for k, (mark, given) in enumerate(pairs) if mark is not None and mark != given), None)
        if wrong is not None:
            raise RecordError(
                "masks_disagree", f"expected loss_mask to agree with the mark of message {wrong}; it does not"
            )
        return replace(self, marks=tuple(given for _, given in pairs))

    def with_system(self, text: str) -> "Conversation":
        """Return the conversation with a system message ahead; one that it begins with must say the same."""
        first = self.messages[0]
        if not text or (first["role"] == "system" and content_text(first) == text):
            return self
        if first["role"] == "system":
            raise RecordError("two_systems", "expected one system text; found another one in the first message")
        ahead: Message = {"role": "system", "content": content_like(first, text)}
        return replace(self, messages=(ahead, *self.messages), marks=(None, *self.marks))

    def with_message(self, place: int, message: Message) -> list[Message]:
        """Return the messages with one of them replaced."""
        return [*self.messages[:place], message, *self.messages[place + 1 :]]


def reasoning_of(message: Message) -> str:
    """Return the reasoning text of a message, or an empty string."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), "")


def content_text(message: Message) -> str | None:
    """Return the text of a message, the first one of several parts; None where there is no content."""
    content = message.get("content")
    if isinstance(content, list):
        return next((str(part["text"]) for part in content if not _is_image(part)), "")
    return content


def content_like(message: Message, text: str) -> str | list[dict[str, Any]]:
    """`text` as content in the form that the message has, for templates that take parts alone."""
    return [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text


def with_texts(message: Message, content: str | None = None, reasoning: str | None = None) -> Message:
    """Return a copy of the message with its content, its reasoning fields or both replaced; None leaves a text as it is."""
    changed = dict(message)
    if content is not None:
        changed["content"] = _with_first_text(message.get("content"), content)
    if reasoning is not None:
        changed |= {name: reasoning for name in REASONING_FIELDS if message.get(name)}
    return changed


def _with_first_text(content: object, text: str) -> str | list[Any]:
    if not isinstance(content, list):
        return text
    first = next((at for at, part in enumerate(content) if not _is_image(part)), None)
    return [part if at != first else part | {"text": text} for at, part in enumerate(content)]


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def read_conversation(messages: object, *, take_images: bool = False) -> Conversation:
    """Return the conversation of a record's `messages` or `conversations`.

    Raises RecordError for no messages, an unknown role, a mark that is neither 0 nor 1, and content that is no text (nor an
    image, with `take_images`).
    """
    if not isinstance(messages, list | tuple):
        raise RecordError("bad_message", f"expected a list of messages; found a {type(messages).__name__}")
    if not messages:
        raise RecordError("empty_conversation", "expected at least one message; found none")
    keep_parts = take_images and any(map(_holds_image, messages))
    read = [_message(place, value, keep_parts) for place, value in enumerate(messages)]
    return Conversation(tuple(message for message, _ in read), marks=tuple(mark for _, mark in read))


def conversation_of_pairs(pairs: Iterable[object]) -> Conversation:
    """Return the conversation of (user's text, assistant's text) pairs; the last answer may be None."""
    messages: list[Message] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise RecordError(
                "bad_message", "expected history to be pairs of a question and its answer; found something else"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return read_conversation(messages if messages[-1]["content"] is not None else messages[:-1])


def _holds_image(message: object) -> bool:
    content = (message.get("content") or message.get("value")) if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(_is_image, content))


def _message(place: int, value: object, keep_parts: bool) -> tuple[Message, bool | None]:
    if not isinstance(value, Mapping):
        raise RecordError("bad_message", f"expected message {place} to be an object; found a {type(value).__name__}")
    fields = {key: item for key, item in value.items() if item is not None}
    role = _role(place, fields.pop("role" if "role" in fields else "from", None))
    content = fields.pop("content" if "content" in fields else "value", None)
    for name in REASONING_FIELDS:
        if not isinstance(fields.get(name, ""), str):
            raise RecordError("bad_content", f"expected {name} of message {place} to be a string")
    mark = _mark(place, fields)
    return {"role": role, **_content(place, role, content, fields, keep_parts), **fields}, mark


def _mark(place: int, fields: Message) -> bool | None:
    """Return whether the message is trained, by the marks taken out of its `fields`; None where there are none."""
    given = {name: fields.pop(name) for name in MARK_FIELDS if name in fields}
    for name, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise RecordError(
                "bad_mark", f"expected {name} of message {place} to be 0 or 1, true or false; found {str(value)[:40]!r}"
            )
    if len(set(map(bool, given.values()))) > 1:
        raise RecordError("masks_disagree", f"expected the marks of message {place} to agree; found {given}")
    return next(map(bool, given.values()), None)


def _role(place: int, value: object) -> str:
    if value is None:
        raise RecordError("bad_message", f"expected message {place} to have a role (or from); found none")
    role = ROLES.get(value.lower()) if isinstance(value, str) else None
    if role is None:
        raise RecordError("unknown_role", f"expected a role of {', '.join(ROLES)}; found {value!r} in message {place}")
    return role


def _content(place: int, role: str, value: object, fields: Mapping[str, Any], keep_parts: bool) -> dict[str, Any]:
    if isinstance(value, str):
        return {"content": value}
    if isinstance(value, list | tuple) and value and keep_parts:
        return {"content": _parts(place, role, value)}
    if isinstance(value, list | tuple) and value:
        return {"content": "".join(_part(place, part) for part in value)}
    stands_alone = any(fields.get(name) for name in (*TOOL_CALL_FIELDS, *REASONING_FIELDS))
    if value is None and role == "assistant" and stands_alone:
        return {}
    found = "none" if value is None else f"a {type(value).__name__}" if value else f"an empty {type(value).__name__}"
    raise RecordError("bad_content", f"expected the content of message {place} to be text; found {found}")


def _parts(place: int, role: str, parts: list[Any] | tuple[Any, ...]) -> list[dict[str, Any]]:
    if role == "assistant":
        return [{"type": "text", "text": "".join(_part(place, part) for part in parts)}]
    return [dict(part) if _is_image(part) else {"type": "text", "text": _part(place, part)} for part in parts]


def _part(place: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", "no type") if isinstance(part, Mapping) else type(part).__name__
    raise RecordError("bad_content", f"expected text parts in the content of message {place}; found a part of {kind!r}")
