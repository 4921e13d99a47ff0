"""One chat template with the run's arguments and date."""

import datetime
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from ...models.errors import UsageError
from .atoms import common_atoms
from .conversation import Message
from .row_error import RowError
from .template_date import with_fixed_date

Span = tuple[int, int]
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
# What Python code called from a template can raise on a row it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
)
_PROBE = "hiddentapprobe"


class ChatTemplate:
    """Renders conversations with one tokenizer's template (or `text` in its place), fixed arguments and a fixed date.

    Renderings raise RowError `template_error` where the template refuses the conversation.
    """

    def __init__(self, tokenizer: Any, text: str | None, args: Mapping[str, Any], date: datetime.date) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._args = dict(args)
        self._date = date
        self._templates: dict[bool, str] = {}
        self._generation_prompts: dict[bool, str] = {}

    def source(self, tools: Tools = None) -> str:
        """The template's text, the date fixed; tokenizers may keep another one for rows with tools.

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
        """The text of the conversation; `source` is a template's text in place of this one's."""
        source = self.source(tools) if source is None else source
        return str(self._apply(source, messages, tools, tokenize=False, add_generation_prompt=generation_prompt))

    def render_with_marks(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """The text of the conversation and the character spans of its `{% generation %}` blocks, empty ones left out."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            texts, spans = render_jinja_template(
                conversations=[plain],
                tools=_listed(tools),
                chat_template=self.source(tools),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._args},
            )
        except _TEMPLATE_ERRORS as error:
            raise _template_error(error) from error
        return texts[0], [(start, end) for start, end in spans[0] if start < end]

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> Any:
        """The token ids of the conversation in one piece: `input_ids`, and `offset_mapping` from a fast tokenizer."""
        options = {
            "verbose": False,
            "return_attention_mask": False,
            "return_offsets_mapping": bool(self._tokenizer.is_fast),
        }
        return self._apply(
            self.source(tools),
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=False,
            tokenizer_kwargs=options,
        )

    def generation_prompt(self, tools: Tools = None) -> str:
        """What the template writes to open the assistant's turn, or "" where it cannot be told."""
        key = tools is not None
        if key not in self._generation_prompts:
            self._generation_prompts[key] = self._find_generation_prompt(tools)
        return self._generation_prompts[key]

    def _find_generation_prompt(self, tools: Tools) -> str:
        probe = [{"role": "user", "content": _PROBE}]
        try:
            closed, opened = self.render(probe, tools), self.render(probe, tools, generation_prompt=True)
        except RowError:
            return ""
        tails = [text.rpartition(_PROBE)[2] for text in (closed, opened)]
        return tails[1][common_atoms(tails[1], tails[0], self.added_tokens) :]

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts the tokenizer keeps whole, such as `<|im_end|>`."""
        return tuple(self._tokenizer.get_added_vocab())

    def _apply(self, source: str, messages: Sequence[Message], tools: Tools, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=_listed(tools), chat_template=source, **options, **self._args
            )
        except _TEMPLATE_ERRORS as error:
            raise _template_error(error) from error


def _listed(tools: Tools) -> list[dict[str, Any]] | None:
    return None if tools is None else list(tools)


def _template_error(error: Exception) -> RowError:
    return RowError("template_error", f"expected the chat template to take the conversation; it says: {error}")
