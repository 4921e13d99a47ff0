"""How rows are tokenised."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...models.errors import UsageError
from .template import RESERVED_ARGUMENTS


@dataclass(frozen=True, kw_only=True)
class TokeniseOptions:
    """What the run fixes for every row.

    `tokenizer`: folder or hub id, at `revision`. `chat_template`: text in place of the tokenizer's own.
    `template_args`: variables for the template. `template_date`: what a template that asks for today gets (ISO text is
    taken too). `max_length`: tokens; a longer row is cut (`on_too_long="truncate"`) or rejected (`"drop"`).
    `loss_on`: `assistant` or `all`; text rows are always supervised throughout. `strict`: warnings about content that
    is not rendered as it stands reject the row. `think`: whether thinking (`<think>` to `</think>`) that would be
    supervised is kept in the mask or taken out (`"mask"`), in every row. `ids_format`: how rows of ids without a mask are
    read: `"plain"` ids are supervised throughout, of `"kimi"` ones the assistant's turns. `vocab_rows`: rows of the
    embedding that ids must fit, None for no check.
    Raises UsageError for a value outside these.
    """

    tokenizer: str
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    template_date: datetime.date | str = field(default_factory=datetime.date.today)
    max_length: int = 4096
    on_too_long: str = "truncate"
    loss_on: str = "assistant"
    think: str = "keep"
    ids_format: str = "plain"
    strict: bool = False
    vocab_rows: int | None = None

    def __post_init__(self) -> None:
        _require_one_of("on_too_long", self.on_too_long, ("truncate", "drop"))
        _require_one_of("loss_on", self.loss_on, ("assistant", "all"))
        _require_one_of("think", self.think, ("keep", "mask"))
        _require_one_of("ids_format", self.ids_format, ("plain", "kimi"))
        if self.loss_on == "all" and self.ids_format != "plain":
            raise UsageError(
                f"loss_on=all supervises every token, so ids_format={self.ids_format} (--ids-format) has no meaning beside "
                "it; give one of them"
            )
        if type(self.max_length) is not int or self.max_length < 1:
            raise UsageError(f"expected max_length to be at least 1 token; found {self.max_length!r}")
        reserved = sorted(RESERVED_ARGUMENTS.intersection(self.template_args))
        if reserved:
            raise UsageError(
                f"expected template arguments of the template's own; found {reserved[0]!r}, which is set here"
            )
        object.__setattr__(self, "template_date", _date(self.template_date))

    @property
    def date(self) -> datetime.date:
        """`template_date` as a date."""
        return _date(self.template_date)


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"expected {name} to be one of {', '.join(known)}; found {value!r}")


def _date(value: datetime.date | str) -> datetime.date:
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected template_date as YYYY-MM-DD; found {value!r}") from error
