"""The characters each token stands for."""

from typing import Any

import numpy as np
import numpy.typing as npt


def keep_white_space_in_offsets(tokenizer: Any) -> None:
    """Makes a fast tokenizer report the white space that its tokens hold.

    GPT-2-like tokenizers trim it from the offsets, not from the tokens: a token that merges a header's space with the
    first word of an answer would look as if it lay wholly inside the answer. Token ids stay as they are.
    """
    if tokenizer.is_fast and tokenizer.backend_tokenizer.post_processor is not None:
        _keep_white_space(tokenizer.backend_tokenizer.post_processor)


def offsets_of(tokenizer: Any, encoding: Any, text: str) -> npt.NDArray[np.int64] | None:
    """Return (S, 2) int64: the characters of `text` that each token of its encoding stands for; None where nobody can tell."""
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


def byte_offsets(tokenizer: Any, ids: list[int], text: str) -> npt.NDArray[np.int64] | None:
    """Return (S, 2) int64 as a fast tokenizer's offset mapping, None unless the tokens' bytes joined are exactly the text's.

    Tokenizers in Python that work on bytes (tiktoken behind most of them) spell tokens in GPT-2's alphabet of 256
    printable characters, and added tokens as they are. A token that holds part of a character gets the whole one.
    """
    added = tokenizer.get_added_vocab()
    pieces = [_bytes_of(token, added) for token in tokenizer.convert_ids_to_tokens(ids)]
    data = text.encode("utf-8")
    if None in pieces or b"".join(piece for piece in pieces if piece is not None) != data:
        return None
    ends = np.cumsum([len(piece or b"") for piece in pieces])
    starts = np.concatenate([[0], ends[:-1]])
    values = np.frombuffer(data, np.uint8)
    # The character that a byte belongs to: continuation bytes look like 0b10xxxxxx and start none.
    character = np.cumsum((values & 0xC0) != 0x80) - 1
    return np.stack([character[starts], character[ends - 1] + 1], axis=1).astype(np.int64)


def _bytes_of(token: str, added: dict[str, int]) -> bytes | None:
    if token in added:
        return token.encode("utf-8")
    values = [_ALPHABET.get(character) for character in token]
    return None if not values or None in values else bytes(value for value in values if value is not None)


def _alphabet() -> dict[str, int]:
    """GPT-2's: a printable Latin-1 byte stands for itself, the others for characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


_ALPHABET = _alphabet()
