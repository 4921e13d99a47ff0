"""The real positions of a batch: numbers given by the caller, never recovered from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..models.decoder import text_config
from ..models.errors import HiddentapError, UsageError
from ..models.images import OwnExpansion


class PositionsError(UsageError):
    """Lengths or a mask that do not say which positions are real."""


class LengthTypeError(HiddentapError, TypeError):
    """A length that is no plain integer."""


@dataclass(frozen=True)
class Held:
    """Positions that a KV cache holds before a call.

    Attributes:
        positions: how many positions each row has in it.
        room: how many it has room for, where that is fixed (a static cache); else None.
    """

    positions: int = 0
    room: int | None = None

    @classmethod
    def by(cls, cache: Any) -> Held:
        """Ask `cache` (None: there is none).

        Raises:
            PositionsError: it cannot tell.
            ValueError: it has no layer that counts, as transformers says of recurrent states alone.
        """
        if cache is None:
            return cls()
        if not hasattr(cache, "get_seq_length"):
            raise PositionsError(
                f"the cache is a {type(cache).__name__}, which cannot tell how many positions it holds, so the rows of this call "
                "have no known place; capture without a cache."
            )
        return cls(int(cache.get_seq_length()), _room_of(cache))


def _room_of(cache: Any) -> int | None:
    if not getattr(cache, "is_compileable", False):  # only a cache of fixed size is
        return None
    room = getattr(cache, "get_max_length", None) or getattr(cache, "get_max_cache_shape", None)
    most = -1 if room is None else int(room() or -1)
    return most if most > 0 else None


@dataclass(frozen=True)
class RealPositions:
    """The real positions of a (B, S) batch: in row b the `lengths[b]` ones from `starts[b]` on.

    Attributes:
        S: positions of each row of the batch, padding included.
        starts: first real position of each row; 0 but for padding on the left.
        lengths: number of real positions of each row.
    """

    S: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def B(self) -> int:
        return len(self.lengths)

    @property
    def T(self) -> int:
        """Number of real positions of the whole batch."""
        return sum(self.lengths)

    @property
    def all_real(self) -> bool:
        return self.B * self.S == self.T

    def flat_index(self) -> Tensor:
        """Return (T,) int64 on the CPU: where the real positions lie in the flattened (B * S) batch, row after row."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        first = torch.arange(self.B) * self.S + torch.tensor(self.starts, dtype=torch.int64)
        before = torch.cumsum(lengths, 0) - lengths
        return torch.repeat_interleave(first - before, lengths) + torch.arange(self.T)

    def expanded(self, expansion: OwnExpansion) -> RealPositions:
        """Return the real positions after a model put image features in the place of placeholders."""
        starts = tuple(map(sum, zip(self.starts, expansion.starts, strict=True)))
        lengths = tuple(map(sum, zip(self.lengths, expansion.added, strict=True)))
        return RealPositions(expansion.input_ids.shape[1], starts, lengths)

    @classmethod
    def all(cls, B: int, S: int) -> RealPositions:
        return cls(S, (0,) * B, (S,) * B)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, B: int, S: int) -> RealPositions:
        """Right-padded rows of `lengths` (B,).

        Raises:
            LengthTypeError: a length that is no integer (bool, float and str are not).
            PositionsError: not one length a row, or a length outside 1..S.
        """
        values = tuple(_plain_length(v) for v in (lengths.tolist() if isinstance(lengths, Tensor) else lengths))
        if len(values) != B:
            raise PositionsError(f"expected one length for each of the {B} rows of the batch; got {len(values)}.")
        wrong = [(b, v) for b, v in enumerate(values) if not 1 <= v <= S]
        if wrong:
            raise PositionsError(
                f"length of row {wrong[0][0]} is {wrong[0][1]}; expected 1..{S}, the width of the batch."
            )
        return cls(S, (0,) * B, values)

    @classmethod
    def from_attention_mask(cls, mask: Tensor, B: int, S: int, held: Held | None = None) -> RealPositions:
        """Return the columns of this call in a mask of 0 and 1, padded on the left or on the right.

        Args:
            mask: (B, held + S), or as wide as a static cache has room: its columns are positions from the first one held on.
            held: what a cache holds before the call; None: nothing.

        Raises:
            PositionsError: another shape, a row without a real position, or a hole between real positions.
        """
        held = held or Held()
        end = held.positions + S
        widths = (end,) if held.room is None or held.room < end else (end, held.room)
        if mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] not in widths:
            cached = f", {held.positions} positions of a cache and {S} of this call" if held.positions else ""
            raise PositionsError(
                f"attention_mask has shape {tuple(mask.shape)}; expected {' or '.join(f'({B}, {width})' for width in widths)}"
                f"{cached}. Give lengths= for other masks."
            )
        real = mask[:, :end].to(device="cpu") != 0
        _refuse_holes(real, S)
        now = real[:, held.positions :].to(torch.int64)
        lengths = now.sum(1)
        if bool((lengths == 0).any()):
            row = int((lengths == 0).nonzero()[0, 0])
            raise PositionsError(f"row {row} of attention_mask has no real position among the {S} of this call.")
        return cls(S, tuple(now.argmax(1).tolist()), tuple(lengths.tolist()))


def real_positions(
    input_ids: Tensor | None,
    B: int,
    S: int,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    attention_mask: Any = None,
    lone_pad_id: int | None = None,
    held: Held | None = None,
) -> RealPositions:
    """Return the real positions of a batch from what its caller gave.

    Without lengths and mask every position is real, even one that holds the pad id, for a pad id that is also an end mark
    is in every real chat. Only where the pad id can be nothing else and a row begins or ends with it is the caller asked.

    Args:
        input_ids: (B, S) or None (a call with embeddings).
        lengths: (B,) real tokens of each right-padded row.
        attention_mask: (B, held + S), or as wide as a static cache; ignored where `lengths` are given.
        lone_pad_id: the model's pad id if it is no other special token.
        held: what a cache holds before the call.

    Raises:
        PositionsError: see `RealPositions`; or padding is certain and neither lengths nor a mask came with it.
    """
    if attention_mask is not None and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        from_mask = RealPositions.from_attention_mask(attention_mask, B, S, held)
        if lengths is None:
            return from_mask
        from_lengths = RealPositions.from_lengths(lengths, B, S)
        if from_lengths != from_mask and not from_mask.all_real:
            raise PositionsError(
                f"lengths {list(from_lengths.lengths)} and attention_mask disagree about which positions are real; give one."
            )
        return from_lengths
    if lengths is not None:
        return RealPositions.from_lengths(lengths, B, S)
    if attention_mask is not None:
        raise PositionsError(
            f"attention_mask is {type(attention_mask).__name__} with no (batch, sequence) rows to read padding from; "
            "give lengths= as well."
        )
    if input_ids is not None and lone_pad_id is not None and S > 1:
        edges = input_ids[:, [0, -1]] == lone_pad_id
        if bool(edges.any()):
            row = int(edges.any(1).nonzero()[0, 0])
            raise PositionsError(
                f"row {row} begins or ends with the pad id {lone_pad_id}, but neither attention_mask nor lengths say which "
                "positions are real; give one of them."
            )
    return RealPositions.all(B, S)


def real_before(mask: Any, held: int, B: int) -> tuple[int, ...]:
    """Return how many of the `held` positions of a cache are real in each row, as a (B, > held) mask tells; without one, all."""
    if held and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > held:
        return tuple((mask[:, :held] != 0).sum(1).tolist())
    return (held,) * B


def has_state(cache: Any) -> bool:
    """Return whether `cache` holds recurrent states of positions that ran before, which it may be unable to count."""
    has_previous_state = getattr(cache, "has_previous_state", False)
    try:
        return bool(has_previous_state() if callable(has_previous_state) else has_previous_state)
    except ValueError:  # transformers' way to say that a cache has no recurrent layer
        return False


def lone_pad_id(config: Any) -> int | None:
    """Return the pad id of a model config if the config gives it no other role, else None."""
    text = text_config(config)
    pad = getattr(text, "pad_token_id", None)
    others: set[Any] = set()
    for name in ("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"):
        value = getattr(text, name, None)
        others.update(value if isinstance(value, (list, tuple)) else [value])
    return pad if isinstance(pad, int) and pad not in others else None


def _plain_length(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise LengthTypeError(
            f"lengths must be plain integers, one for each row of the batch; got {value!r} ({type(value).__name__})."
        )
    return int(value)


def _refuse_holes(real: Tensor, S: int) -> None:
    """real: (B, W) bool, W >= S. Each row must be one run of real positions."""
    edges = torch.diff(real.to(torch.int8), dim=1, prepend=torch.zeros(real.shape[0], 1, dtype=torch.int8))
    runs = (edges == 1).sum(1)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0, 0])
        after_padding = (
            " Padding on the right of a prompt stays in front of what is generated: use padding_side='left' in generate()."
            if real.shape[1] > S
            else ""
        )
        raise PositionsError(
            f"row {row} of attention_mask has a hole: real positions must stand next to each other.{after_padding}"
        )


def counted_positions(mask: Tensor) -> Tensor:
    """Return (B, W) int64: the positions of the real columns of a mask (B, W), counted from 0; 0 in padding before them."""
    return (mask.to(torch.int64).cumsum(1) - 1).clamp(min=0)
