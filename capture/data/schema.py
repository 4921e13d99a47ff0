"""The forms of a record: conversation, text, token ids, and those of other tools that become one of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .chat.conversation import Conversation, conversation_of_pairs, read_conversation
from .errors import RecordError
from .records.fields import Fields
from .records.given_ids import TokenIds, read_token_ids

ID_FIELDS = ("id", "conversation_id", "uuid", "custom_id")
BODY_FIELDS = ("messages", "conversations", "text", "input_ids")
# Forms of other tools, read where none of the above is there.
OTHER_FORMS = ("prompt", "instruction", "query", "body")
# Answers that are compared with each other, and answers that are learned from.
_PREFERENCE = ("chosen", "rejected")
_ANSWERS = ("completion", "response", "output")
_SYSTEM_FIELDS = ("system", "system_prompt", "system_message")


@dataclass(frozen=True)
class Text:
    """Plain text; characters before `completion` are a prompt, which is not supervised."""

    text: str
    completion: int = 0

    @property
    def prompt(self) -> str:
        """What a model is asked to go on from: the prompt where there is one, else the whole text."""
        return self.text[: self.completion] or self.text


Body = Conversation | Text | TokenIds


def read_body(fields: Fields, *, take_images: bool = False) -> Body:
    """Return what the record holds. A null field counts as absent; of several known fields the first of `BODY_FIELDS` counts.

    Raises RecordError where no known field is there or its value has another shape; an image part is one without `take_images`.
    """
    field = next((field for field in (*BODY_FIELDS, *OTHER_FORMS) if fields.holds(field)), None)
    if field == "text":
        return Text(_text(fields.take("text")))
    if field == "input_ids":
        return read_token_ids(fields)
    if field == "body":
        return _batch_request(fields, take_images=take_images)
    if field == "prompt":
        return _prompt_and_completion(fields, take_images=take_images)
    if field in ("instruction", "query"):
        return _completed(fields, _instruction(fields))
    if field is None and fields.holds(*_PREFERENCE):
        raise _preference(fields)
    if field is None:
        raise RecordError("no_known_field", _no_known_field(fields))
    messages = fields.take(field)
    return _completed(fields, read_conversation(messages, take_images=take_images))


def require_no_preference(fields: Fields) -> None:
    """Raise RecordError for a record of preferences, which does not say by itself which answer to learn from.

    That is a prompt with a chosen and a rejected answer, or with one that the record calls undesirable. A generation can still
    read the prompt.
    """
    if fields.holds(*BODY_FIELDS) or not fields.holds(*OTHER_FORMS):
        return
    if fields.holds(*_PREFERENCE) and not fields.holds(*_ANSWERS):
        raise _preference(fields)
    if fields.holds(*_ANSWERS) and fields.peek("label") is False:
        raise RecordError(
            "preference",
            "expected an answer to learn from; found an undesirable one (label: false); take such rows out",
        )


def _preference(fields: Fields) -> RecordError:
    return RecordError(
        "preference",
        f"expected one answer to learn from; found a preference pair ({fields.shown()}); give the chosen one as messages, or as "
        "completion beside prompt",
    )


def read_id(fields: Fields, source: str, line: int) -> str:
    """Return the record's own id, kept as given (a number as its digits), or `source:line` where it has none.

    Raises RecordError for an id that holds a lone surrogate, which no file could hold.
    """
    for name in ID_FIELDS:
        value = fields.take(name)
        if value is None or value == "":
            continue
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            break
        require_encodable(str(value), "id")
        return str(value)
    return f"{source}:{line}"


def require_encodable(text: str, what: str) -> None:
    """Raise RecordError where the text holds a lone surrogate: half a character, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(
            "lone_surrogate", f"expected whole characters; found a lone surrogate in the {what}"
        ) from error


def _no_known_field(fields: Fields) -> str:
    expected = f"expected one of {', '.join(BODY_FIELDS)}; found {fields.shown()}"
    if fields.holds("response") and fields.holds("custom_id"):
        return f"{expected}: the answers of a batch; join them with the messages of their requests by custom_id (docs/rows.md)"
    return expected


def _completed(fields: Fields, conversation: Conversation) -> Conversation:
    """Return the conversation with what the record says beside its messages: system, tools, template arguments and a mask."""
    if fields.holds("loss_mask"):
        conversation = conversation.masked(fields.take("loss_mask"))
    names = ("tools",) if fields.holds("tools") else ("functions",)
    tools = read_tools(fields.take(*names))
    if tools and names == ("functions",):
        tools = tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
    arguments = _template_arguments(fields.take("chat_template_kwargs"))
    if fields.holds("mask") and str(fields.take("mask")).lower() not in ("user", "human"):
        raise RecordError("bad_mask", "expected mask to name the user's role, whose turns it leaves out; found another")
    conversation = replace(conversation, tools=tools, template_args=arguments)
    for name in _SYSTEM_FIELDS:
        text = fields.take(name)
        if isinstance(text, str):
            conversation = conversation.with_system(text)
        elif text is not None:
            raise RecordError("bad_system", f"expected {name} to be a string; found a {type(text).__name__}")
    return conversation


def read_tools(value: object) -> tuple[dict[str, Any], ...] | None:
    """Return the tools of a record, a list of objects or JSON text of one; None where there are none."""
    value = _parsed(value, "tools", "list")
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, dict) for tool in value):
        raise RecordError("bad_tools", f"expected tools to be a list of objects; found a {type(value).__name__}")
    return tuple(value) or None


def _template_arguments(value: object) -> Mapping[str, Any]:
    value = _parsed(value, "chat_template_kwargs", "object")
    if value is not None and not isinstance(value, Mapping):
        raise RecordError(
            "bad_chat_template_kwargs",
            f"expected chat_template_kwargs to be an object; found a {type(value).__name__}",
        )
    return value or {}


def _parsed(value: object, name: str, kind: str) -> Any:
    """Tables cannot hold free-form values, so many datasets keep them as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"bad_{name}", f"expected {name} to be a JSON {kind}; found {error}") from error


def _prompt_and_completion(fields: Fields, *, take_images: bool) -> Conversation | Text:
    """`prompt` with `completion` (or `response`), both text or messages; only the completion is supervised."""
    prompt, completion = fields.take("prompt"), fields.take("completion", "response")
    if isinstance(prompt, str) and (completion is None or isinstance(completion, str)):
        return Text(_text(prompt + (completion or "")), len(prompt))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion or []
    if not isinstance(before, list | tuple) or not isinstance(after, list | tuple):
        raise RecordError(
            "bad_message", "expected prompt and completion to be texts or lists of messages; found something else"
        )
    conversation = read_conversation([*before, *after], take_images=take_images)
    return _completed(fields, conversation.left_out(range(len(before))))


def _instruction(fields: Fields) -> Conversation:
    """Alpaca's `instruction`, `input`, `output` and `history`, and `query`, `response` of the same shape."""
    names = ("instruction", "input") if fields.holds("instruction") else ("query",)
    asked = [text for text in map(fields.take, names) if text is not None and text != ""]
    history, answer = fields.take("history") or (), fields.take("output", "response")
    if not all(isinstance(text, str) for text in asked) or not isinstance(history, list | tuple):
        raise RecordError(
            "bad_text", f"expected {' and '.join(names)} to be strings and history a list; found something else"
        )
    pairs = [*history, ("\n".join(asked), answer)]
    return conversation_of_pairs(pairs)


def _batch_request(fields: Fields, *, take_images: bool) -> Body:
    """Return a line of OpenAI's batch format: the messages and tools of the request in `body`."""
    if not isinstance(fields.peek("body"), Mapping):
        raise RecordError("no_known_field", _no_known_field(fields))
    fields.note("method", "url")
    inner = fields.part("body")
    if inner.holds("body"):
        raise RecordError("no_known_field", f"expected a request with messages in body; found {inner.shown()}")
    return read_body(inner, take_images=take_images)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RecordError("bad_text", f"expected text to be a string; found a {type(value).__name__}")
    if not value:
        raise RecordError("empty", "expected text to hold at least one character; found none")
    return value
