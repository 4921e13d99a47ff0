"""The characters each token stands for."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .byte_tokens import byte_offsets


def keep_white_space_in_offsets(tokenizer: Any) -> None:
    """Makes a fast tokenizer report the white space that its tokens hold.

    GPT-2-like tokenizers trim it from the offsets, not from the tokens: a token that merges a header's space with the
    first word of an answer would look as if it lay wholly inside the answer. Token ids stay as they are.
    """
    if tokenizer.is_fast and tokenizer.backend_tokenizer.post_processor is not None:
        _keep_white_space(tokenizer.backend_tokenizer.post_processor)


def offsets_of(tokenizer: Any, encoding: Any, text: str) -> npt.NDArray[np.int64] | None:
    """(S, 2) int64: the characters of `text` that each token of its encoding stands for; None where nobody can tell."""
    mapping = encoding.get("offset_mapping")
    if mapping is None:
        return byte_offsets(tokenizer, list(encoding["input_ids"]), text)
    return np.asarray(mapping, np.int64).reshape(-1, 2)


def _keep_white_space(processor: Any) -> None:
    if hasattr(processor, "trim_offsets"):
        processor.trim_offsets = False
    for part in _parts(processor):
        _keep_white_space(part)


def _parts(processor: Any) -> list[Any]:
    parts: list[Any] = []
    if hasattr(processor, "__getitem__"):
        # The library's sequence has no length; it ends with an IndexError.
        while True:
            try:
                parts.append(processor[len(parts)])
            except IndexError:
                break
    return parts
