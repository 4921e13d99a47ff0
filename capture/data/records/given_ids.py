"""Records of token ids that were made elsewhere, with the masks that other tools write beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RecordError
from .fields import Fields

IGNORED_LABEL = -100
# A token is supervised where all of these say so: TRL writes the first two of one record side by side.
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


@dataclass(frozen=True)
class TokenIds:
    """Ids made elsewhere. `loss_mask` is as long as `input_ids` and holds 0 and 1; None supervises every token.

    `rule`: the fields that made the mask, `row` for `loss_mask` alone.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None
    rule: str = "row"


def read_token_ids(fields: Fields) -> TokenIds:
    """Return the ids of a record, without padding, and its mask.

    `labels` are unshifted, -100 where a token is not supervised; where `attention_mask` is 0 a token is padding.
    Raises RecordError for values of another shape, masks that contradict each other, padding inside, and packed samples.
    """
    ids = fields.take("input_ids")
    if not isinstance(ids, list | tuple) or not all(type(value) is int for value in ids):
        raise RecordError("bad_input_ids", "expected input_ids to be a list of integers; found something else")
    if not ids:
        raise RecordError("empty", "expected input_ids to hold at least one token; found none")
    masks = {name: _mask(name, fields.take(name), len(ids)) for name in _MASKS if fields.holds(name)}
    mask = _joined(masks)
    if fields.holds("labels"):
        mask = _agreeing(_mask_of_labels(fields.take("labels"), ids), mask)
        masks["labels"] = mask
    kept = _attended(fields.take("attention_mask"), len(ids))
    _require_one_sample(fields.take("position_ids"), kept, len(ids))
    if fields.holds("token_type_ids") and not any(_integers("token_type_ids", fields.take("token_type_ids"), len(ids))):
        fields.note("token_type_ids")
    rule = "row" if list(masks) in ([], ["loss_mask"]) else "+".join(sorted(masks))
    return TokenIds(tuple(ids[kept]), None if mask is None else tuple(mask[kept]), rule)


def read_mask(name: str, value: object) -> tuple[int, ...]:
    """Return a list of 0 and 1, or of booleans, as integers; raise RecordError for anything else."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, int) and one in (0, 1) for one in value):
        raise RecordError(f"bad_{name}", f"expected {name} to be a list of 0 and 1; found something else")
    return tuple(int(one) for one in value)


def _mask(name: str, value: object, length: int) -> tuple[int, ...]:
    mask = read_mask(name, value)
    if len(mask) != length:
        raise RecordError(f"bad_{name}", f"expected {name} as long as input_ids ({length}); found {len(mask)}")
    return mask


def _joined(masks: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the masks of TRL's trainer together, which `loss_mask` must agree with."""
    both = [masks[name] for name in _MASKS[:2] if name in masks]
    joined = tuple(min(marks) for marks in zip(*both, strict=True)) if both else None
    return _agreeing(masks["loss_mask"], joined) if "loss_mask" in masks else joined


def _agreeing(mask: tuple[int, ...], other: tuple[int, ...] | None) -> tuple[int, ...]:
    if other is not None and mask != other:
        at = next(place for place, (one, two) in enumerate(zip(mask, other, strict=True)) if one != two)
        raise RecordError(
            "masks_disagree",
            f"expected the masks of a row to agree; found that they differ at token {at}; give one of them",
        )
    return mask


def _mask_of_labels(labels: object, ids: Sequence[int]) -> tuple[int, ...]:
    values = _integers("labels", labels, len(ids))
    wrong = next((at for at, label in enumerate(values) if label not in (IGNORED_LABEL, ids[at])), None)
    if wrong is not None:
        raise RecordError(
            "bad_labels",
            f"expected each of the labels to be {IGNORED_LABEL} or the token itself, unshifted; found {values[wrong]} at token "
            f"{wrong}, which is {ids[wrong]}",
        )
    return tuple(int(label != IGNORED_LABEL) for label in values)


def _attended(mask: object, length: int) -> slice:
    """Return the tokens that are no padding."""
    if mask is None:
        return slice(0, length)
    marks = _mask("attention_mask", mask, length)
    if not any(marks):
        raise RecordError("empty", "expected attention_mask to leave at least one token; found zeros alone")
    start, stop = marks.index(1), length - marks[::-1].index(1)
    if not all(marks[start:stop]):
        raise RecordError(
            "bad_attention_mask",
            f"expected zeros of attention_mask at the ends alone, where they mean padding; found one at token "
            f"{start + marks[start:stop].index(0)}",
        )
    return slice(start, stop)


def _require_one_sample(position_ids: object, kept: slice, length: int) -> None:
    """Raise RecordError for positions that do not count up from 0: several samples packed into one, or a moved one."""
    if position_ids is None:
        return
    places = _integers("position_ids", position_ids, length)[kept]
    wrong = next((at for at, place in enumerate(places) if place != at), None)
    if wrong is not None:
        raise RecordError(
            "bad_position_ids",
            f"expected position_ids to count up from 0 over one sample; found {places[wrong]} at token {wrong}; give a packed "
            "row as one row per sample",
        )


def _integers(name: str, value: Any, length: int) -> list[int]:
    if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
        raise RecordError(f"bad_{name}", f"expected {name} to be a list of integers; found something else")
    if len(value) != length:
        raise RecordError(f"bad_{name}", f"expected {name} as long as input_ids ({length}); found {len(value)}")
    return list(value)
