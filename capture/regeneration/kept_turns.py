"""The tokens of a finished conversation that the model wrote in earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from ...models.errors import UsageError
from ..data import RecordEncoder
from ..data.chat.conversation import Conversation
from ..data.chat.rendering import render_conversation
from ..data.errors import RecordError
from ..data.masks.loss_mask import LossMasks
from ..data.offsets import offsets_of
from .written import WrittenTurn


def kept_turns(
    encoder: RecordEncoder,
    before: Conversation,
    prompt_ids: Sequence[int],
    written: Sequence[WrittenTurn],
    marks: Sequence[bool | None],
) -> tuple[list[int], list[int]]:
    """Return the mask (P,) over the last prompt, and how many tokens of each earlier turn it marks.

    The template may write an earlier turn otherwise than the model did: without its thinking, without white space at its ends,
    with an end mark behind an answer that was cut, or in other tokens. Marked are the tokens that the model itself wrote, in
    their order.

    Args:
        before: the conversation without its last answer.
        prompt_ids: (P,) the last prompt, its rendering with the generation prompt behind it.
        written: the new turns but the last.
        marks: per message of the record; False leaves a turn out.
    """
    mask, counts = [0] * len(prompt_ids), []
    rows = _rows_of_turns(encoder, before, prompt_ids) if written else {}
    for turn in written:
        own = rows.get(turn.place, [])
        if turn.place < len(marks) and marks[turn.place] is False:
            own = []
        found = _same([prompt_ids[row] for row in own], turn.answer.token_ids)
        for row, same in zip(own, found, strict=True):
            mask[row] |= int(same)
        counts.append(sum(found))
    return mask, counts


def _rows_of_turns(
    encoder: RecordEncoder, before: Conversation, prompt_ids: Sequence[int]
) -> dict[int | None, list[int]]:
    """Return the rows of every assistant turn in the last prompt, by the place of its message; {} where they cannot be told.

    Raises:
        UsageError: a tokenizer that does not tell the characters of its tokens.
    """
    template = encoder.template.with_arguments(before.template_args)
    try:
        rendering = render_conversation(template, before)
        spans = LossMasks(template, "assistant").turns(rendering)
        encoding = template.encode(rendering.text, before.messages, before.tools)
    except RecordError:
        return {}
    ids = list(encoding["input_ids"])
    offsets = offsets_of(encoder.tokenizer, encoding, rendering.text)
    if offsets is None:
        raise UsageError(
            "expected a tokenizer that tells the characters of each token (a fast one); this one does not, so earlier turns "
            "cannot be marked; use its fast version, or write the last turn alone (--turns last)"
        )
    shared = _common(ids, prompt_ids)
    starts = offsets[:shared, 0]
    return {place: np.flatnonzero((starts >= start) & (starts < end)).tolist() for place, (start, end) in spans}


def _same(found: Sequence[int], wrote: Sequence[int]) -> list[bool]:
    """Mark the tokens of `found` that are, in order, tokens that the model `wrote`: the end of them first, then the start."""
    end = _common(found[::-1], wrote[::-1])
    start = _common(found[: len(found) - end], wrote[: len(wrote) - end])
    inner, written = found[start : len(found) - end], wrote[start : len(wrote) - end]
    same = [place < start or place >= len(found) - end for place in range(len(found))]
    for block in SequenceMatcher(None, inner, written, autojunk=False).get_matching_blocks():
        same[start + block.a : start + block.a + block.size] = [True] * block.size
    return same


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens are equal."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
