"""A check that a tokenizer's files mean the same without the code that comes with them."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import UsageError
from .hub import file_of


class TokenizerCodeError(UsageError):
    """A tokenizer whose token ids only its own code makes."""


def require_code_allowed(name: str, revision: str | None, *, trust_remote_code: bool) -> None:
    """Refuse a tokenizer that transformers would rebuild from its vocabulary with another split of the text.

    A ``tokenizer.json`` holds the whole rule and needs no code.

    Raises:
        TokenizerCodeError: code makes the ids and is not allowed, or a ``tiktoken.model`` lies there without any.
    """
    if trust_remote_code or file_of(name, revision, "tokenizer.json") is not None:
        return
    settings = file_of(name, revision, "tokenizer_config.json")
    code = _code_of(settings) if settings is not None else None
    if code is not None:
        raise TokenizerCodeError(
            f"expected a tokenizer at {name}; it cannot be loaded: it is code that comes with it ({code}), "
            "without which the same text gets other token ids. "
            "Read the code and allow it with --trust-remote-code, which runs none for a model that transformers has a class for; "
            "rows of input_ids need no tokenizer."
        )
    if file_of(name, revision, "tiktoken.model") is not None:
        raise TokenizerCodeError(
            f"expected a tokenizer at {name}; it cannot be loaded: it is a tiktoken.model, which does not say how "
            "text is split before it: another split "
            "makes other token ids. Save the tokenizer as a tokenizer.json first; rows of input_ids need no tokenizer."
        )


def _code_of(settings: Path) -> str | None:
    try:
        named = json.loads(settings.read_text(encoding="utf-8")).get("auto_map") or {}
    except (ValueError, AttributeError) as error:
        raise TokenizerCodeError(f"{settings} is no JSON object ({error}); fetch the tokenizer again.") from error
    if isinstance(named, dict):  # old ones name the classes alone
        named = named.get("AutoTokenizer")
    if not isinstance(named, str | list | None) or not all(isinstance(one, str | None) for one in named or ()):
        raise TokenizerCodeError(
            f"{settings}: auto_map is {named!r}; expected names of classes. Fetch the tokenizer again."
        )
    names = [one for one in named or () if one] if not isinstance(named, str) else [named]
    return names[-1] if names else None
