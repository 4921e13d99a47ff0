"""Which rows a step of vLLM makes, and from where in its cache they are taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .arena import RowArena

# Under this name a request says at which row of the arena its rows begin.
ROW = "hiddentap_row"


class NewRequest(Protocol):
    """What is used of a request that vLLM schedules for the first time."""

    req_id: str
    prompt_token_ids: list[int] | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    sampling_params: Any


@dataclass(frozen=True)
class Piece:
    """The first tokens of one request, all computed in one step.

    Attributes:
        row: where in the arena they go.
        token_ids: (S,) what went in, as vLLM has it.
        block_ids: the blocks of the cache that hold their states, in order.
    """

    row: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


def pieces_of(requests: Iterable[NewRequest], scheduled: Mapping[str, int], group: int) -> tuple[Piece, ...]:
    """The pieces of one step.

    Requests that name no row, as those by which vLLM warms up, are left out. A prompt that is not computed whole from its
    start on gives a piece of what is; the rest stays unwritten and is missed by who reads the arena.

    Args:
        scheduled: how many tokens of each request the step computes.
        group: which of a request's lists of blocks is that of the hidden states.
    """
    pieces = []
    for request in requests:
        row = _row(request.sampling_params)
        if row is None or request.prompt_token_ids is None or request.num_computed_tokens:
            continue
        token_ids = request.prompt_token_ids[: scheduled[request.req_id]]
        pieces.append(Piece(row, tuple(token_ids), tuple(request.block_ids[group])))
    return tuple(pieces)


def write_pieces(pieces: Sequence[Piece], cache: Tensor, arena: RowArena) -> None:
    """Copy the rows of `pieces` into the arena.

    cache: (blocks, K, block size, H), vLLM's cache of the hidden states.
    """
    block_size = cache.shape[2]
    for piece in pieces:
        positions = torch.arange(len(piece.token_ids))
        blocks = torch.tensor(piece.block_ids)[positions // block_size].to(cache.device)
        rows = cache[blocks, :, (positions % block_size).to(cache.device)]
        arena.write(piece.row, torch.tensor(piece.token_ids, dtype=torch.int32), rows)


def _row(sampling_params: Any) -> int | None:
    given = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
    row = given.get(ROW)
    return None if row is None else int(row)
