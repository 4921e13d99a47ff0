"""The tokens that end an answer, and who names them: the model's configs, the tokenizer, or the chat template."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....models.errors import UsageError
from ...data.chat.template import ChatTemplate
from ...data.errors import RecordError

_ANSWER = "qxzanswerzxq"


@dataclass(frozen=True)
class EndMarks:
    """End-of-sequence tokens of a generation.

    Attributes:
        by_origin: token ids by who names them; nobody who names none.
    """

    by_origin: Mapping[str, tuple[int, ...]]

    @property
    def token_ids(self) -> frozenset[int]:
        """Return all of them: a model trained on chats ends a turn with the template's mark, whatever its config names."""
        return frozenset(token for tokens in self.by_origin.values() for token in tokens)

    def as_json(self) -> dict[str, list[int]]:
        return {origin: list(tokens) for origin, tokens in self.by_origin.items()}

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, template: ChatTemplate | None = None) -> EndMarks:
        """Collect them; without a template the tokenizer's own is asked.

        Args:
            model: its generation config is asked, and its config where that names none.
            template: that prompts are rendered with.
        """
        config = _ids(getattr(model, "generation_config", None))
        found = {"generation config": config} if config else {"config": _ids(getattr(model, "config", None))}
        if tokenizer is not None:
            found["tokenizer"] = _ids(tokenizer)
            found["chat template"] = _of_template(tokenizer, template)
        return cls({origin: ids for origin, ids in found.items() if ids})


def _ids(named: Any) -> tuple[int, ...]:
    ids = getattr(named, "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _of_template(tokenizer: Any, template: ChatTemplate | None) -> tuple[int, ...]:
    """Return the special token right after the content of a last assistant turn; none where no token of its own stands there.

    The last turn and not one inside: some templates (gpt-oss) end a turn that another one of the assistant follows with a mark
    that a model also writes between its thinking and its answer.
    """
    template = template or ChatTemplate(tokenizer, None, {}, datetime.date.today())
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        _, found, tail = template.render(messages).rpartition(_ANSWER)
    except (RecordError, UsageError):
        return ()
    marks = sorted(template.added_tokens, key=len, reverse=True)
    mark = _first_of(tail.lstrip(), marks) if found else None
    token = None if mark is None else tokenizer.convert_tokens_to_ids(mark)
    return (token,) if isinstance(token, int) else ()


def _first_of(text: str, marks: Iterable[str]) -> str | None:
    return next((mark for mark in marks if mark.strip() and text.startswith(mark.strip())), None)
