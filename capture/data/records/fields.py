"""Fields of a record: those that a reader consumed, and those that nothing read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RecordError

_MASKS = (
    "assistant_mask", "assistant_masks", "completion_mask", "labels", "loss_mask", "loss_weights", "token_weights",
    "train_detail", "training_detail",
)  # fmt: skip
_MEDIA = ("audio", "audios", "image", "images", "video", "videos")
# Ignored, each of these makes wrong ids or masks, so a record that has one unread is rejected.
_CHANGES_VALUES = frozenset((*_MASKS, *_MEDIA, "cu_seqlens", "position_ids", "seq_lengths"))
# Each of these says how the record is meant; unread, it is a reject of a strict run.
_CHANGES_MEANING = frozenset(
    {
        "adapter", "adapters", "attention_mask", "chat_template", "chat_template_kwargs", "functions", "lora", "mask",
        "system", "system_message", "system_prompt", "token_type_ids", "tools", "weight", "weights",
    }
)  # fmt: skip


@dataclass(frozen=True)
class FieldUse:
    """Names of a record's fields, sorted; a field of its messages is `messages.NAME`.

    `read`: those that a reader consumed. `unread`: those that nothing consumed and that are neither null nor empty.
    """

    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def with_messages(self, names: Iterable[str], known: frozenset[str]) -> FieldUse:
        """Add the fields of the messages: read are those among `known`, the words of the template."""
        names = set(names)
        shown = names & (known - _CHANGES_VALUES)
        read, unread = ({f"messages.{name}" for name in part} for part in (shown, names - shown))
        return FieldUse(tuple(sorted({*self.read, *read})), tuple(sorted({*self.unread, *unread})))

    def require_harmless(self, *, strict: bool) -> None:
        """Raise RecordError for an unread field that would change ids or masks, or, if `strict`, how the record is meant."""
        for path in self.unread:
            name = path.rpartition(".")[2]
            if name in _CHANGES_VALUES or (strict and name in _CHANGES_MEANING):
                raise RecordError(
                    "unread_field",
                    f"expected every field that changes tokens or masks to be one that this form of row has; found {path!r}, "
                    "which nothing reads here; see docs/rows.md for the forms, or take the field out",
                )


NO_FIELDS = FieldUse()


class Fields:
    """The values of one object of a record; a value that is taken counts as read.

    `path`: what precedes its names, such as `body.`; empty for the record itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self._parts: list[Fields] = []

    def holds(self, *names: str) -> bool:
        """Return whether one of these fields is there and not null."""
        return any(self._values.get(name) is not None for name in names)

    def take(self, *names: str) -> Any:
        """Return the first of these fields that is not null, counted as read; None where there is none."""
        name = next((name for name in names if self.holds(name)), None)
        if name is None:
            return None
        self._read.add(name)
        return self._values[name]

    def peek(self, name: str) -> Any:
        """Return the value of a field without counting it as read."""
        return self._values.get(name)

    def note(self, *names: str) -> None:
        """Count fields as read that say nothing more than the form of the record does."""
        self._read.update(name for name in names if self.holds(name))

    def part(self, name: str) -> Fields:
        """Return the fields of the object in field `name`; their use is counted with these."""
        part = Fields(self.take(name), f"{self._path}{name}.")
        self._parts.append(part)
        return part

    def shown(self) -> str:
        """Return the first names, for an error."""
        names = (repr(name) + (" (null)" if value is None else "") for name, value in list(self._values.items())[:8])
        return ", ".join(names) or "no field"

    def use(self) -> FieldUse:
        """Return which fields were read until now, and which were not."""
        uses = [part.use() for part in self._parts]
        read = [f"{self._path}{name}" for name in self._read] + [name for use in uses for name in use.read]
        left = [name for name, value in self._values.items() if name not in self._read and not _is_empty(value)]
        unread = [f"{self._path}{name}" for name in left] + [name for use in uses for name in use.unread]
        return FieldUse(tuple(sorted(read)), tuple(sorted(unread)))


def without_nulls(value: Any) -> Any:
    """Return the value without the nulls of its objects, at any depth: tables give every object of a column every field."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value[:64]):
        return [without_nulls(item) for item in value]
    return value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)
