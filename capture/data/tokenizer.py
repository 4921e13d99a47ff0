"""The run's tokenizer."""

from typing import Any

from transformers import AutoTokenizer

from ...models.errors import UsageError


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder or hub id. Raises UsageError where there is none that can be loaded."""
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise UsageError(f"expected a tokenizer at {name}; it cannot be loaded: {error}") from error
