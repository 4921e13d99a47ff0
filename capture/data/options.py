"""Options of tokenization."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...models.checked_fields import CheckedFields
from ...models.choices import IdsFormat, LossOn, OnDropped, OnTooLong, Think
from ...models.errors import UsageError
from ...models.model_source import ModelSource
from .chat.template import RESERVED_ARGUMENTS


@dataclass(frozen=True, kw_only=True)
class Rendering(CheckedFields):
    """Options that render a conversation to text.

    Attributes:
        chat_template: text in place of the tokenizer's own.
        template_args: variables for the template.

    Raises:
        UsageError: a template argument whose name the run sets itself.
    """

    chat_template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        reserved = sorted(RESERVED_ARGUMENTS.intersection(self.template_args))
        if reserved:
            raise UsageError(
                f"expected template arguments of the template's own; found {reserved[0]!r}, which is set here"
            )

    def tokenise_options(
        self, source: ModelSource, *, date: datetime.date | str, vocab_rows: int | None = None
    ) -> "TokeniseOptions":
        """Return these options for the tokenizer of `source`; what they do not say has its default."""
        names = [one.name for one in fields(TokeniseOptions)]
        return TokeniseOptions(
            tokenizer=source.name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            template_date=date,
            vocab_rows=vocab_rows,
            **{name: getattr(self, name) for name in names if hasattr(self, name)},
        )


@dataclass(frozen=True, kw_only=True)
class TextRules(Rendering):
    """Rules that turn one record into token ids and a loss mask.

    Attributes:
        max_length: tokens; a longer row is cut (``on_too_long="truncate"``) or rejected (``"drop"``).
        loss_on: which tokens the mask marks, ``assistant``, ``last`` (the last assistant turn alone) or ``all``; text rows that
            hold no turns in the template's marks are always supervised throughout.
        think: whether thinking (`<think>` to `</think>`) that would be supervised is kept in the mask or taken out
            (``"mask"``), in every row.
        ids_format: how rows of ids without a mask are read: ``"plain"`` ids are supervised throughout, of ``"kimi"`` ones
            the assistant's turns.
        on_dropped: whether a conversation with a part that the template drops is rejected (``"raise"``: and ends the run) or
            kept with a warning.
        strict: warnings about content that is not rendered as it stands reject the row.

    Raises:
        UsageError: a value outside these.
    """

    max_length: int = 4096
    on_too_long: OnTooLong = "truncate"
    loss_on: LossOn = "assistant"
    think: Think = "keep"
    ids_format: IdsFormat = "plain"
    on_dropped: OnDropped = "reject"
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(max_length=1)
        if self.loss_on == "all" and self.ids_format != "plain":
            raise UsageError(
                f"loss_on=all supervises every token, so ids_format={self.ids_format} (--ids-format) has no meaning beside "
                "it; give one of them"
            )


@dataclass(frozen=True, kw_only=True)
class TokeniseOptions(TextRules):
    """What the run fixes for every row.

    Attributes:
        tokenizer: folder or hub id, at `revision`.
        template_date: what a template that asks for today gets (ISO text is taken too).
        vocab_rows: rows of the embedding that ids must fit, None for no check.
    """

    tokenizer: str
    revision: str | None = None
    trust_remote_code: bool = False
    template_date: datetime.date | str = field(default_factory=datetime.date.today)
    vocab_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "template_date", _date(self.template_date))

    @property
    def date(self) -> datetime.date:
        """`template_date` as a date."""
        return _date(self.template_date)


def _date(value: datetime.date | str) -> datetime.date:
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected template_date as YYYY-MM-DD; found {value!r}") from error
