"""What a row holds: a conversation, a text or token ids, and its id."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .conversation import Conversation, read_conversation
from .row_error import RowError

ID_FIELDS = ("id", "conversation_id", "uuid")
BODY_FIELDS = ("messages", "conversations", "text", "input_ids")


@dataclass(frozen=True)
class Text:
    """Plain text, supervised throughout."""

    text: str


@dataclass(frozen=True)
class TokenIds:
    """Ids made elsewhere. `loss_mask` is as long as `input_ids` and holds 0 and 1; None supervises every token."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None


def read_body(row: Mapping[str, Any], *, take_images: bool = False) -> Conversation | Text | TokenIds:
    """What the row holds. A null field counts as absent; of several known fields the first of `BODY_FIELDS` counts.

    Raises RowError where no known field is there or its value has another shape; an image part is one without `take_images`.
    """
    field = next((field for field in BODY_FIELDS if row.get(field) is not None), None)
    if field is None:
        fields = (repr(name) + (" (null)" if value is None else "") for name, value in list(row.items())[:8])
        found = ", ".join(fields) or "no field"
        raise RowError("no_known_field", f"expected one of {', '.join(BODY_FIELDS)}; found {found}")
    if field == "text":
        return Text(_text(row["text"]))
    if field == "input_ids":
        return _token_ids(row["input_ids"], row.get("loss_mask"))
    return read_conversation(row[field], row.get("tools"), take_images=take_images)


def read_id(row: Mapping[str, Any], source: str, line: int) -> str:
    """The row's own id, kept as given (a number as its digits), or `source:line` where it has none.

    Raises RowError for an id that holds a lone surrogate, which no file could hold.
    """
    values = (row.get(field) for field in ID_FIELDS)
    value = next((value for value in values if value is not None and value != ""), None)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return f"{source}:{line}"
    sample_id = str(value)
    require_encodable(sample_id, "id")
    return sample_id


def require_encodable(text: str, what: str) -> None:
    """Raises RowError where the text holds a lone surrogate: half a character, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("lone_surrogate", f"expected whole characters; found a lone surrogate in the {what}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RowError("bad_text", f"expected text to be a string; found a {type(value).__name__}")
    if not value:
        raise RowError("empty", "expected text to hold at least one character; found none")
    return value


def _token_ids(ids: object, mask: object) -> TokenIds:
    if not isinstance(ids, list | tuple) or not all(type(value) is int for value in ids):
        raise RowError("bad_input_ids", "expected input_ids to be a list of integers; found something else")
    if not ids:
        raise RowError("empty", "expected input_ids to hold at least one token; found none")
    return TokenIds(tuple(ids), None if mask is None else _mask(mask, len(ids)))


def _mask(mask: object, length: int) -> tuple[int, ...]:
    if not isinstance(mask, list | tuple) or not all(isinstance(value, int) and value in (0, 1) for value in mask):
        raise RowError("bad_loss_mask", "expected loss_mask to be a list of 0 and 1; found something else")
    if len(mask) != length:
        raise RowError("bad_loss_mask", f"expected loss_mask as long as input_ids ({length}); found {len(mask)}")
    return tuple(int(value) for value in mask)
