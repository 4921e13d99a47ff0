"""Prompts: token ids, made from texts and conversations where they are not ids already."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...models.errors import UsageError
from ..data.conversation import Conversation, read_conversation
from ..data.row_error import RowError
from ..data.schema import Text, TokenIds
from ..data.template import ChatTemplate

PromptLike: TypeAlias = "Prompt | str | Sequence[int] | Sequence[Mapping[str, Any]]"


@dataclass(frozen=True)
class Prompt:
    """The token ids a request begins with, and where they came from."""

    token_ids: tuple[int, ...]
    sample_id: str
    source: str = ""
    line: int = 0


class PromptMaker:
    """Turns texts and conversations into token ids with one tokenizer and its chat template.

    A conversation becomes everything before the assistant's answer, with the template's generation prompt behind it: where its
    last turn is the assistant's own, that turn is left out.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template or ChatTemplate(tokenizer, None, {}, datetime.date.today())

    def token_ids(self, body: Conversation | Text | TokenIds) -> tuple[int, ...]:
        """The prompt's token ids.

        Raises:
            RowError: there is nothing to answer, or the template refuses the conversation.
            UsageError: the tokenizer has no chat template.
        """
        if isinstance(body, TokenIds):
            return tuple(body.input_ids)
        if isinstance(body, Text):
            return tuple(self._tokenizer(body.text, verbose=False)["input_ids"])
        messages = body.messages[:-1] if answered(body) else body.messages
        if not messages:
            raise RowError("no_prompt", "expected a turn before the assistant's; found the answer alone")
        text = self._template.render(list(messages), body.tools, generation_prompt=True)
        # The template writes the special tokens itself.
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def answered(conversation: Conversation) -> bool:
    """Whether its last turn is the assistant's, which a prompt leaves out."""
    return bool(conversation.messages[-1]["role"] == "assistant")


def prompts_of(prompts: Sequence[PromptLike], tokenizer: Any) -> list[Prompt]:
    """A `Prompt` of each; what is no `Prompt` is named by its place.

    Raises:
        UsageError: a prompt that is none, or one that needs a tokenizer where there is none.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts is a list of prompts; found one string. Write [prompt].")
    maker = None if tokenizer is None else PromptMaker(tokenizer)
    return [
        prompt if isinstance(prompt, Prompt) else Prompt(_token_ids(place, prompt, maker), str(place))
        for place, prompt in enumerate(prompts)
    ]


def prompt_fault(prompt: Prompt, vocab_rows: int | None, max_positions: int | None) -> str | None:
    """Why a model cannot take a prompt; `None` where it can."""
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
        return maker.token_ids(Text(prompt) if isinstance(prompt, str) else read_conversation(prompt, None))
    except RowError as error:
        raise UsageError(f"prompt {place}: {error}.") from error
