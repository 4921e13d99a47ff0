"""The date a chat template reads: fixed for the run, never the clock."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ....models.errors import UsageError
from ..errors import BrokenTemplateError, RecordError, first_line
from .conversation import Message
from .text_diff import Span, common_atoms

_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ"
_DATE_MACRO = "{% macro strftime_now(format) %}"


def with_fixed_date(template: str, date: datetime.date) -> str:
    """Return the template, with `strftime_now` answering for midnight of `date` instead of reading the clock.

    A template that never names it comes back unchanged. transformers turns callables among the template's arguments
    into placeholder text, so the function is a macro ahead of the template; the newline between the two is trimmed
    like any first newline after a block, so nothing else of the rendering moves.
    """
    if "strftime_now" not in template:
        return template
    return f"{_DATE_MACRO}{{{{ format{_replacements(date)} }}}}{{% endmacro %}}\n{template}"


def _replacements(date: datetime.date) -> str:
    moment = datetime.datetime.combine(date, datetime.time())
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in _DIRECTIVES]
    # An escaped percent must not start a directive: it waits as a NUL until all directives are replaced.
    pairs = [("%%", "\0"), *((directive, moment.strftime(directive)) for directive in directives), ("\0", "%")]
    return "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in pairs)


Tools = Sequence[dict[str, Any]] | None

# What `apply_chat_template` takes for itself, and the date function that the run fixes.
RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_PROBE = "hiddentapprobe"


class ChatTemplate:
    """Renders conversations with one tokenizer's template (or `text` in its place), fixed arguments and a fixed date.

    Renderings raise RecordError `template_error` where the template refuses the conversation, BrokenTemplateError where Jinja
    cannot read the template.
    """

    def __init__(self, tokenizer: Any, text: str | None, args: Mapping[str, Any], date: datetime.date) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._args = dict(args)
        self._date = date
        self._templates: dict[bool, str] = {}
        self._generation_prompts: dict[bool, str] = {}

    def source(self, tools: Tools = None) -> str:
        """Return the template's text, the date fixed; tokenizers may keep another one for rows with tools.

        Raises UsageError where the tokenizer has none.
        """
        with_tools = tools is not None
        if with_tools not in self._templates:
            try:
                text = self._tokenizer.get_chat_template(self._text, list(tools or ()) or None)
            except ValueError as error:
                raise UsageError(
                    f"expected a chat template; found none in the tokenizer; give one ({error})"
                ) from error
            self._templates[with_tools] = with_fixed_date(text, self._date)
        return self._templates[with_tools]

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        generation_prompt: bool = False,
        source: str | None = None,
    ) -> str:
        """Return the text of the conversation; `source` is a template's text in place of this one's."""
        source = self.source(tools) if source is None else source
        return str(self._apply(source, messages, tools, tokenize=False, add_generation_prompt=generation_prompt))

    def render_with_marks(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """Return the text of the conversation and the character spans of its `{% generation %}` blocks, empty ones left out."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        source = self.source(tools)
        try:
            texts, spans = render_jinja_template(
                conversations=[plain],
                tools=_listed(tools),
                chat_template=source,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._args},
            )
        except Exception as error:
            raise self._refused(error) from error
        return texts[0], [(start, end) for start, end in spans[0] if start < end]

    def encode(
        self, text: str, messages: Sequence[Message], tools: Tools = None, generation_prompt: bool = False
    ) -> Any:
        """Return the token ids of a conversation in one piece: `input_ids`, and `offset_mapping` from a fast tokenizer.

        `text`: its rendering, as `render` returns it, which transformers' own `apply_chat_template` would make once more. A
        tokenizer with an `apply_chat_template` of its own is asked for the ids, since it may make them of more than the text.
        Raises RecordError `tokenizer_error` where the tokenizer fails.
        """
        tokenizer = self._tokenizer
        options = {
            "verbose": False,
            "return_attention_mask": False,
            "return_offsets_mapping": bool(tokenizer.is_fast),
        }
        if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
            return tokenized(tokenizer, text, add_special_tokens=False, **options)
        return self._apply(
            self.source(tools),
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=generation_prompt,
            tokenizer_kwargs=options,
        )

    def with_arguments(self, args: Mapping[str, Any]) -> "ChatTemplate":
        """Return the template with more arguments, which go before the run's own.

        Raises RecordError for one that is set here.
        """
        if not args:
            return self
        reserved = sorted(RESERVED_ARGUMENTS.intersection(args))
        if reserved:
            raise RecordError(
                "bad_chat_template_kwargs",
                f"expected template arguments of the template's own; found {reserved[0]!r}, which is set here",
            )
        return ChatTemplate(self._tokenizer, self._text, {**self._args, **args}, self._date)

    def words(self, tools: Tools = None) -> frozenset[str]:
        """Return every word of the template's text: a field of a message that is none of them is read by nothing."""
        return _words(self.source(tools))

    def generation_prompt(self, tools: Tools = None) -> str:
        """Return the text with which the template opens the assistant's turn, or "" if it cannot be found."""
        key = tools is not None
        if key not in self._generation_prompts:
            self._generation_prompts[key] = self._find_generation_prompt(tools)
        return self._generation_prompts[key]

    def _find_generation_prompt(self, tools: Tools) -> str:
        probe = [{"role": "user", "content": _PROBE}]
        try:
            closed, opened = self.render(probe, tools), self.render(probe, tools, generation_prompt=True)
        except (RecordError, BrokenTemplateError):
            return ""
        tails = [text.rpartition(_PROBE)[2] for text in (closed, opened)]
        return tails[1][common_atoms(tails[1], tails[0], self.added_tokens) :]

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """Return the texts the tokenizer keeps whole, such as `<|im_end|>`."""
        return tuple(self._tokenizer.get_added_vocab())

    def _apply(self, source: str, messages: Sequence[Message], tools: Tools, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=_listed(tools), chat_template=source, **options, **self._args
            )
        except Exception as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> RecordError | BrokenTemplateError:
        """Return the error for a template that refused one conversation, or every conversation."""
        if not isinstance(error, TemplateSyntaxError):
            return RecordError(
                "template_error", f"expected the chat template to take the conversation; it says: {error}"
            )
        owner = "that was given" if self._text is not None else f"of {self._tokenizer.name_or_path}"
        line = error.lineno - (error.source or "").startswith(_DATE_MACRO)
        return BrokenTemplateError(
            f"the chat template {owner} cannot be read by Jinja: {error.message} (line {line}). Mend it, or give another one."
        )


def tokenized(tokenizer: Any, text: str, **options: Any) -> Any:
    """Return the tokenizer's encoding of a text; raise RecordError `tokenizer_error` where its code fails."""
    try:
        return tokenizer(text, **options)
    except Exception as error:
        raise RecordError(
            "tokenizer_error", f"expected the tokenizer to take the text; it failed with {first_line(error)}"
        ) from error


@lru_cache(maxsize=8)
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", source))


def _listed(tools: Tools) -> list[dict[str, Any]] | None:
    return None if tools is None else list(tools)
