"""The rows of each step of vLLM, and their places in its cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arena import RowArena

# Under this name a request says at which row of the arena its rows begin.
ROW = "hiddentap_row"


@dataclass(frozen=True)
class StepPiece:
    """Tokens of one request that are computed in one step.

    Attributes:
        row: where in the arena the first of them goes.
        first: position of the first of them in its prompt.
        token_ids: (S,) what goes in, as vLLM has it.
        block_ids: the blocks of the cache that hold the prompt's states, from its position 0 on.
    """

    row: int
    first: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass
class _Followed:
    """A request that names a row, while vLLM works on it."""

    row: int
    prompt: list[int]
    blocks: list[int]

    def piece(self, first: int, count: int) -> StepPiece | None:
        """Return the part of the prompt among the `count` tokens from position `first` on."""
        token_ids = self.prompt[first : first + count]
        return StepPiece(self.row + first, first, tuple(token_ids), tuple(self.blocks)) if token_ids else None


class StepPieces:
    """Follows requests from step to step, for a prompt can be computed in several.

    Requests that name no row, as those by which vLLM warms up, are left out.
    """

    def __init__(self, group: int) -> None:
        """`group`: which of a request's lists of blocks is that of the hidden states."""
        self._group = group
        self._followed: dict[str, _Followed] = {}

    def of_step(self, step: Any) -> tuple[StepPiece, ...]:
        """Return the pieces of `step`, a `SchedulerOutput` of vLLM."""
        pieces = []
        for req_id, first in self._scheduled(step):
            followed = self._followed.get(req_id)
            piece = followed.piece(first, step.num_scheduled_tokens[req_id]) if followed else None
            if piece is not None:
                pieces.append(piece)
        return tuple(pieces)

    def forget(self, req_id: str) -> None:
        """Drop the finished request."""
        self._followed.pop(req_id, None)

    def _scheduled(self, step: Any) -> Iterator[tuple[str, int]]:
        """Yield each request of the step and its first position; remember the new ones."""
        for request in step.scheduled_new_reqs:
            row = _row(request.sampling_params)
            if row is not None and request.prompt_token_ids is not None:
                blocks = list(request.block_ids[self._group])
                self._followed[request.req_id] = _Followed(row, request.prompt_token_ids, blocks)
                yield request.req_id, request.num_computed_tokens
        known = step.scheduled_cached_reqs
        for req_id, blocks, first in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
            if req_id in self._followed:
                self._add_blocks(req_id, blocks, anew=req_id in known.resumed_req_ids)
                yield req_id, first

    def _add_blocks(self, req_id: str, blocks: tuple[list[int], ...] | None, *, anew: bool) -> None:
        """`anew`: the request was set back and its earlier blocks are not its own any more."""
        followed = self._followed[req_id]
        if anew:
            followed.blocks = []
        if blocks is not None:
            followed.blocks.extend(blocks[self._group])


def write_pieces(pieces: Sequence[StepPiece], cache: Tensor, arena: RowArena) -> None:
    """Copy the rows of `pieces` into the arena.

    cache: (blocks, K, block size, H), vLLM's cache of the hidden states.
    """
    block_size = cache.shape[2]
    for piece in pieces:
        positions = torch.arange(piece.first, piece.first + len(piece.token_ids))
        blocks = torch.tensor(piece.block_ids)[positions // block_size].to(cache.device)
        rows = cache[blocks, :, (positions % block_size).to(cache.device)]
        arena.write(piece.row, torch.tensor(piece.token_ids, dtype=torch.int32), rows)


def _row(sampling_params: Any) -> int | None:
    given = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
    row = given.get(ROW)
    return None if row is None else int(row)
