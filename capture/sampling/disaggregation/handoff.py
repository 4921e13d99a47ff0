"""The hand-off from prefill to decode: the first output token of a request, in fixed slots."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....models.errors import RunError, UsageError


@dataclass(frozen=True)
class FirstToken:
    """The first output token and what was recorded of it; checked where it enters a slot, which is reset before that.

    token_id: the token.
    logprob: its log-probability; `None` where it was not asked for.
    top_logprobs, top_ids: the likeliest tokens' log-probabilities, and these tokens.
    wants_sampling_mask: whether the request asked for its sampling mask.
    sampling_mask: the support; `None` where there is none, which an empty one is not.
    sampling_logprob: log-probability in the support.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: Sequence[float] = ()
    top_ids: Sequence[int] = ()
    wants_sampling_mask: bool = False
    sampling_mask: Sequence[int] | None = None
    sampling_logprob: float | None = None


MASK_MAX_TOKENS_VARIABLE = "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"

_ABSENT = -1


class MetadataBuffers:
    """Slots that a prefill process fills and a decode process reads; each holds one request's first output token.

    Args:
        slots: how many there are.
        max_top_logprobs: room for top log-probabilities per slot.
        max_sampling_mask_tokens: room for sampling-mask ids per slot; by default from the environment variable
            `SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS`; 0, or a variable that is not set, allocates none.

    Tensors, on the CPU: `token_ids` (slots,) int32, `logprobs` (slots,) float32, `top_lengths` (slots,) int32,
    `top_logprobs` (slots, n) float32, `top_ids` (slots, n) int32, and with masks `mask_lengths` (slots,) int32,
    `mask_ids` (slots, C) int32, `sampling_logprobs` (slots,) float32. Lengths count the valid entries of a row; -1 is no
    mask, and no token in `token_ids`; NaN is no log-probability.

    Raises:
        UsageError: no slot, or a negative capacity.

    Example:
        >>> from hiddentap.capture.sampling import FirstToken
        >>> buffers = MetadataBuffers(slots=2)
        >>> buffers.set_buf(0, FirstToken(42, logprob=-0.5))
        >>> buffers.get_buf(0).token_id, buffers.get_buf(0).logprob
        (42, -0.5)
    """

    def __init__(self, slots: int, max_top_logprobs: int = 0, max_sampling_mask_tokens: int | None = None) -> None:
        capacity = _capacity_from_environment() if max_sampling_mask_tokens is None else max_sampling_mask_tokens
        if slots < 1 or max_top_logprobs < 0 or capacity < 0:
            raise UsageError(
                "metadata buffers need at least one slot and no negative capacity; found "
                f"slots={slots}, max_top_logprobs={max_top_logprobs}, max_sampling_mask_tokens={capacity}."
            )
        self.slots = slots
        self.max_top_logprobs = max_top_logprobs
        self.max_sampling_mask_tokens = capacity
        self._tensors = {
            "token_ids": torch.full((slots,), _ABSENT, dtype=torch.int32),
            "logprobs": torch.full((slots,), math.nan),
            "top_lengths": torch.zeros(slots, dtype=torch.int32),
            "top_logprobs": torch.zeros(slots, max_top_logprobs),
            "top_ids": torch.zeros(slots, max_top_logprobs, dtype=torch.int32),
        }
        if capacity:
            self._tensors |= {
                "mask_lengths": torch.full((slots,), _ABSENT, dtype=torch.int32),
                "mask_ids": torch.zeros(slots, capacity, dtype=torch.int32),
                "sampling_logprobs": torch.full((slots,), math.nan),
            }

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers themselves by name, in a fixed order; what a transport moves."""
        return dict(self._tensors)

    def set_buf(self, slot: int, first: FirstToken) -> None:
        """Fill a slot; its earlier content is lost, even if this raises.

        Raises:
            RunError: a mask without buffers for masks, more than fits, or a log-probability that is NaN.
            UsageError: there is no such slot.
        """
        self.clear_buf(slot)
        self._check_fits(first)
        _check_values(first)
        if first.wants_sampling_mask and first.sampling_mask is not None:
            self._fill(slot, "mask_lengths", "mask_ids", first.sampling_mask)
            self._tensors["sampling_logprobs"][slot] = _stored(first.sampling_logprob)
        self._fill(slot, "top_lengths", "top_ids", first.top_ids)
        self._fill(slot, "top_lengths", "top_logprobs", first.top_logprobs)
        self._tensors["logprobs"][slot] = _stored(first.logprob)
        self._tensors["token_ids"][slot] = first.token_id

    def get_buf(self, slot: int, wants_sampling_mask: bool = False) -> FirstToken:
        """Read a slot; the mask is `None` where the prefill side had none or this side does not want it.

        Raises:
            RunError: the slot holds no token, or a mask is wanted and there are no buffers for masks.
            UsageError: there is no such slot.
        """
        self._check_slot(slot)
        if wants_sampling_mask:
            self._check_masks_enabled()
        token_id = int(self._tensors["token_ids"][slot])
        if token_id == _ABSENT:
            raise RunError(f"slot {slot} holds no first token: the prefill side did not fill it, or failed to.")
        mask, sampling_logprob = self._mask(slot) if wants_sampling_mask else (None, None)
        top = int(self._tensors["top_lengths"][slot])
        return FirstToken(
            token_id=token_id,
            logprob=_number(self._tensors["logprobs"][slot]),
            top_logprobs=self._tensors["top_logprobs"][slot, :top].tolist(),
            top_ids=self._tensors["top_ids"][slot, :top].tolist(),
            wants_sampling_mask=wants_sampling_mask,
            sampling_mask=mask,
            sampling_logprob=sampling_logprob,
        )

    def clear_buf(self, slot: int) -> None:
        """Empty a slot.

        Raises:
            UsageError: there is no such slot.
        """
        self._check_slot(slot)
        if self.max_sampling_mask_tokens:
            self._tensors["mask_lengths"][slot] = _ABSENT
            self._tensors["sampling_logprobs"][slot] = math.nan
        self._tensors["token_ids"][slot] = _ABSENT
        self._tensors["logprobs"][slot] = math.nan
        self._tensors["top_lengths"][slot] = 0

    def _mask(self, slot: int) -> tuple[list[int] | None, float | None]:
        length = int(self._tensors["mask_lengths"][slot])
        if length == _ABSENT:
            return None, None
        return self._tensors["mask_ids"][slot, :length].tolist(), _number(self._tensors["sampling_logprobs"][slot])

    def _fill(self, slot: int, lengths: str, values: str, row: Sequence[float]) -> None:
        self._tensors[values][slot, : len(row)] = torch.tensor(row, dtype=self._tensors[values].dtype)
        self._tensors[lengths][slot] = len(row)

    def _check_fits(self, first: FirstToken) -> None:
        if first.wants_sampling_mask:
            self._check_masks_enabled()
            length = len(first.sampling_mask or ())
            if length > self.max_sampling_mask_tokens:
                raise RunError(
                    f"Sampling mask length {length} exceeds disaggregation metadata capacity "
                    f"{self.max_sampling_mask_tokens}. Increase {MASK_MAX_TOKENS_VARIABLE}."
                )
        if len(first.top_ids) > self.max_top_logprobs:
            raise RunError(
                f"top_logprobs_num {len(first.top_ids)} exceeds disaggregation metadata capacity "
                f"{self.max_top_logprobs}. Lower top_logprobs_num or increase the metadata buffer."
            )

    def _check_masks_enabled(self) -> None:
        if not self.max_sampling_mask_tokens:
            raise RunError(f"return_sampling_mask with disaggregation requires {MASK_MAX_TOKENS_VARIABLE} > 0.")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise UsageError(f"slot {slot} does not exist; there are {self.slots}, numbered from 0.")


def _capacity_from_environment() -> int:
    text = os.environ.get(MASK_MAX_TOKENS_VARIABLE, "").strip() or "0"
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{MASK_MAX_TOKENS_VARIABLE} must be an integer >= 0; found {text!r}.")
    return int(text)


def _check_values(first: FirstToken) -> None:
    for name, values in (
        ("logprob", [first.logprob]),
        ("top_logprobs", first.top_logprobs),
        ("sampling_logprob", [first.sampling_logprob]),
    ):
        if any(value is not None and math.isnan(value) for value in values):
            raise RunError(f"{name} of first token {first.token_id} is NaN, which is not handed off: found {values}.")
    if first.token_id < 0 or len(first.top_logprobs) != len(first.top_ids):
        raise RunError(
            f"a first token needs an id >= 0 and one id per top log-probability; found id {first.token_id}, "
            f"{len(first.top_logprobs)} top log-probabilities and {len(first.top_ids)} ids for them."
        )


def _stored(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob


def _number(value: Tensor) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
