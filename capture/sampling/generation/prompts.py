"""Prompts: token ids, made from texts and conversations where they are not ids already."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from ....models.errors import UsageError
from ...data.chat.conversation import Conversation, read_conversation
from ...data.chat.template import ChatTemplate, tokenized
from ...data.errors import RecordError
from ...data.records.given_ids import TokenIds
from ...data.schema import Body, Text

PromptLike: TypeAlias = "Prompt | str | Sequence[int] | Sequence[Mapping[str, Any]]"


@dataclass(frozen=True)
class Prompt:
    """The token ids a request begins with, and where they came from.

    Attributes:
        token_ids: at least one.
        sample_id: names the sample in messages and in the shards.
        source, line: the file and the line, counted from 1, that it came from.

    Example:
        >>> prompt = Prompt((5, 6, 7), "row-1", source="prompts.jsonl", line=1)
        >>> generate_with_capture(model, [prompt], SamplingParams(max_new_tokens=2), layer_ids=[1])[0].prompt_ids
        (5, 6, 7)
    """

    token_ids: tuple[int, ...]
    sample_id: str
    source: str = ""
    line: int = 0


class TextSource(Protocol):
    """A tokenizer and its chat template; asking for either raises UsageError where it cannot be loaded."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def template(self) -> ChatTemplate: ...


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer that the caller loaded, with its own chat template and today's date."""

    tokenizer: Any

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, None, {}, datetime.date.today())


class PromptMaker:
    """Turns texts and conversations into token ids, by the encoding that a capture has for whole ones.

    A conversation becomes everything before the assistant's answer, with the template's generation prompt behind it: where its
    last turn is the assistant's own, that turn is left out.
    """

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def token_ids(self, body: Body) -> tuple[int, ...]:
        """Return the prompt's token ids.

        Raises:
            RecordError: there is nothing to answer, or the template refuses the conversation.
            UsageError: the tokenizer has no chat template.
        """
        if isinstance(body, TokenIds):
            return tuple(body.input_ids)
        if isinstance(body, Text):
            return tuple(tokenized(self._source.tokenizer, body.prompt, verbose=False)["input_ids"])
        messages = body.messages[:-1] if answered(body) else body.messages
        if not messages:
            raise RecordError("no_prompt", "expected a turn before the assistant's; found the answer alone")
        return self.ids_before(replace(body, messages=messages))

    def ids_before(self, conversation: Conversation) -> tuple[int, ...]:
        """Return the token ids of all messages, with the template's generation prompt behind them; raises as `token_ids`."""
        messages, tools = conversation.messages, conversation.tools
        template = self._source.template.with_arguments(conversation.template_args)
        text = template.render(list(messages), tools, generation_prompt=True)
        return tuple(template.encode(text, messages, tools, generation_prompt=True)["input_ids"])


def answered(conversation: Conversation) -> bool:
    """Return whether the last turn is the assistant's, which a prompt leaves out."""
    return bool(conversation.messages[-1]["role"] == "assistant")


def prompts_of(prompts: Sequence[PromptLike], tokenizer: Any) -> list[Prompt]:
    """Return a `Prompt` of each; name anything that is no `Prompt` by its place.

    Raises:
        UsageError: a prompt that is none, or one that needs a tokenizer where there is none.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts is a list of prompts; found one string. Write [prompt].")
    maker = None if tokenizer is None else PromptMaker(GivenTokenizer(tokenizer))
    return [
        prompt if isinstance(prompt, Prompt) else Prompt(_token_ids(place, prompt, maker), str(place))
        for place, prompt in enumerate(prompts)
    ]


def prompt_fault(prompt: Prompt, vocab_rows: int | None, max_positions: int | None) -> str | None:
    """Return why a model cannot take a prompt; `None` if it can."""
    ids = prompt.token_ids
    if not ids:
        return "expected at least one token; found none"
    outside = next((token for token in ids if token < 0 or (vocab_rows is not None and token >= vocab_rows)), None)
    if outside is not None:
        return f"expected ids within 0..{(vocab_rows or 0) - 1}; found {outside}"
    if max_positions is not None and len(ids) > max_positions:
        return f"expected at most {max_positions} tokens, all that the model has positions for; found {len(ids)}"
    return None


def _token_ids(place: int, prompt: Any, maker: PromptMaker | None) -> tuple[int, ...]:
    if not isinstance(prompt, str) and all(type(token) is int for token in prompt):
        return tuple(prompt)
    if maker is None:
        raise UsageError(f"prompt {place} is no list of token ids; give a tokenizer for texts and conversations.")
    try:
        return maker.token_ids(Text(prompt) if isinstance(prompt, str) else read_conversation(prompt))
    except RecordError as error:
        raise UsageError(f"prompt {place}: {error}.") from error
