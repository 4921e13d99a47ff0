"""The run's tokenizer."""

from typing import Any

from transformers import AutoTokenizer

from ...models.errors import UsageError
from ...models.hub import unreachable


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder or hub id. Raises UsageError where there is none that can be loaded."""
    fault = unreachable(name)
    if fault is not None:
        raise UsageError(f"expected a tokenizer at {name}; it cannot be loaded: {fault}")
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise UsageError(f"expected a tokenizer at {name}; it cannot be loaded: {error}") from error
