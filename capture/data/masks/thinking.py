"""Thinking inside what is supervised: the spans from `<think>` to `</think>`, tags included."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..chat.conversation import reasoning_of
from ..chat.rendering import Rendering
from ..chat.text_diff import Span
from ..errors import RecordError

OPENING, CLOSING = "<think>", "</think>"


def without_thinking(
    tokenizer: Any, ids: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Return the mask, (S,) uint8, with every token of a think span taken out.

    Only supervised stretches are looked at, each for itself, so a tag in a user's text opens nothing. A span that is not
    closed reaches to the end of its stretch (a sample cut while the model thought); one that was opened right before the
    stretch (by the generation prompt), or that is closed and never opened, begins with it. A token that holds characters of
    both sides is taken out.
    """
    text, offsets = _text_of_tokens(tokenizer, ids)
    left = loss_mask.copy()
    for first, end in _stretches(loss_mask):
        starts, ends = offsets[first:end, 0], offsets[first:end, 1]
        for opened, closed in _spans(text, int(starts[0]), int(ends[-1])):
            left[first:end][(ends > opened) & (starts < closed)] = 0
    return left


def require_tagged(rendering: Rendering) -> None:
    """Raises RecordError where the reasoning of a row is rendered without think tags: it could not be told from answers."""
    if OPENING in rendering.text:
        return
    for place, message in enumerate(rendering.conversation.messages):
        if reasoning_of(message) and reasoning_of(message) in rendering.text:
            raise RecordError(
                "thinking_not_tagged",
                f"expected the template to render the reasoning of message {place} between {OPENING} and {CLOSING}; found "
                "it without them, so it cannot be masked; keep it (--think keep)",
            )


def _text_of_tokens(tokenizer: Any, ids: npt.NDArray[np.int64]) -> tuple[str, npt.NDArray[np.int64]]:
    """Return the tokens' texts, each decoded alone, joined, and (S, 2) int64 where each lies in it.

    Half a character decodes to a stand-in, which is no part of a tag.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    known = len(tokenizer)  # a model may have more rows of embeddings than its tokenizer has tokens
    texts = {i: str(tokenizer.decode([i], **options)) if i < known else "" for i in np.unique(ids).tolist()}
    pieces = [texts[token] for token in ids.tolist()]
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return "".join(pieces), np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)


def _stretches(loss_mask: npt.NDArray[np.uint8]) -> list[tuple[int, int]]:
    """First token and one past the last of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(loss_mask, prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _spans(text: str, start: int, end: int) -> Iterator[Span]:
    opened = text.find(OPENING, start, end)
    closing = text.find(CLOSING, start, end)
    if text[:start].rstrip().endswith(OPENING) or 0 <= closing < (opened if opened >= 0 else end):
        opened = start
    while opened >= 0:
        closed = text.find(CLOSING, opened, end)
        if closed < 0:
            yield opened, end
            return
        yield opened, closed + len(CLOSING)
        opened = text.find(OPENING, closed, end)
