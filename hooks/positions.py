"""Which positions of a batch are real: known numbers given by the caller, never recovered from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.decoder import text_config
from ..models.errors import UsageError
from ..models.images import Expansion


class PositionsError(UsageError):
    """Lengths or a mask that do not say which positions are real."""


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
        """(T,) int64 on the CPU: where the real positions lie in the flattened (B * S) batch, row after row."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        first = torch.arange(self.B) * self.S + torch.tensor(self.starts, dtype=torch.int64)
        before = torch.cumsum(lengths, 0) - lengths
        return torch.repeat_interleave(first - before, lengths) + torch.arange(self.T)

    def expanded(self, expansion: Expansion) -> RealPositions:
        """The real positions after a model put image features in the place of placeholders."""
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
            PositionsError: not one length a row, or a length outside 1..S.
        """
        values = tuple(int(v) for v in (lengths.tolist() if isinstance(lengths, Tensor) else lengths))
        if len(values) != B:
            raise PositionsError(f"expected one length for each of the {B} rows of the batch; got {len(values)}.")
        wrong = [(b, v) for b, v in enumerate(values) if not 1 <= v <= S]
        if wrong:
            raise PositionsError(
                f"length of row {wrong[0][0]} is {wrong[0][1]}; expected 1..{S}, the width of the batch."
            )
        return cls(S, (0,) * B, values)

    @classmethod
    def from_attention_mask(cls, mask: Tensor, B: int, S: int) -> RealPositions:
        """The last S columns of a (B, >= S) mask of 0 and 1, padded on the left or on the right.

        Raises:
            PositionsError: another shape, a row without a real position, or a hole between real positions.
        """
        if mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] < S:
            raise PositionsError(
                f"attention_mask has shape {tuple(mask.shape)}; expected ({B}, {S}), or wider where a cache holds earlier "
                "positions. Give lengths= for other masks."
            )
        real = mask.to(device="cpu") != 0
        _refuse_holes(real)
        now = real[:, mask.shape[1] - S :].to(torch.int64)
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
) -> RealPositions:
    """The real positions of a batch from what its caller gave.

    Without lengths and mask every position is real, even one that holds the pad id, for a pad id that is also an end mark
    is in every real chat. Only where the pad id can be nothing else and a row begins or ends with it is the caller asked.

    Args:
        input_ids: (B, S) or None (a call with embeddings).
        lengths: (B,) real tokens of each right-padded row.
        attention_mask: (B, >= S); ignored where `lengths` are given.
        lone_pad_id: the model's pad id if it is no other special token.

    Raises:
        PositionsError: see `RealPositions`; or padding is certain and neither lengths nor a mask came with it.
    """
    if attention_mask is not None and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        from_mask = RealPositions.from_attention_mask(attention_mask, B, S)
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


def lone_pad_id(config: Any) -> int | None:
    """The pad id of a model config if the config gives it no other role, else None."""
    text = text_config(config)
    pad = getattr(text, "pad_token_id", None)
    others: set[Any] = set()
    for name in ("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"):
        value = getattr(text, name, None)
        others.update(value if isinstance(value, (list, tuple)) else [value])
    return pad if isinstance(pad, int) and pad not in others else None


def _refuse_holes(real: Tensor) -> None:
    """real: (B, W) bool. Each row must be one run of real positions."""
    edges = torch.diff(real.to(torch.int8), dim=1, prepend=torch.zeros(real.shape[0], 1, dtype=torch.int8))
    runs = (edges == 1).sum(1)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0, 0])
        raise PositionsError(f"row {row} of attention_mask has a hole: real positions must stand next to each other.")
