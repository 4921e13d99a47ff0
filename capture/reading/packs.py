"""Packs: whole samples end to end, up to a budget of tokens, in a shuffled order that can be gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...models.errors import UsageError
from ..store import CapturedDataset
from .order import epoch_order
from .post_norm import PostNorm

WINDOW = 1024


class PackedDataset(IterableDataset[dict[str, Any]]):
    """Packs of the samples of `dataset`, from `first_pack` of `epoch` to the epoch's end.

    A pack is a dict over its T <= token_budget rows and M samples: every row column of the dataset end to end (input_ids (T,)
    int64, loss_mask (T,), aux_hidden_states (T, K, H), ...), segment_ids (T,) int32 (0..M-1: which of the pack's samples),
    position_ids (T,) int64 (counted within each sample), sample_indices (M,) int64 (into `dataset`), and `pack`, its number.

    Every rank makes the same packs from the lengths alone and takes every world_size-th; DataLoader workers share a rank's
    packs in turns, so that a DataLoader gives them in one order whatever its number of workers. Over all ranks and workers each
    sample comes exactly once an epoch; ranks may differ by one pack.

    Args:
        token_budget: most rows of a pack.
        seed: each epoch has an order of its own, made from it.
        window: how many samples are mixed at a time; see `epoch_order`.
        post_norm: adds the column post_norm, made from pre_norm.

    Raises:
        UsageError: a sample longer than the budget, or numbers out of range.
    """

    def __init__(
        self,
        dataset: CapturedDataset,
        token_budget: int,
        *,
        seed: int = 0,
        window: int = WINDOW,
        rank: int = 0,
        world_size: int = 1,
        post_norm: PostNorm | None = None,
    ) -> None:
        _check_numbers(seed, window, rank, world_size)
        _check_lengths(dataset.lengths, token_budget)
        if post_norm is not None:
            post_norm.require_columns(dataset)
        self.dataset = dataset
        self.token_budget = token_budget
        self.seed = seed
        self.window = window
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first_pack = 0
        self._post_norm = post_norm

    def pack_samples(self) -> list[NDArray[np.int64]]:
        """The sample indices of each pack of this rank in this epoch."""
        bits = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)[0])
        order = epoch_order(self.dataset.places.shard_of, self.dataset.places.position, self.window, bits)
        edges = pack_edges(self.dataset.lengths[order], self.token_budget)
        return [order[edges[i] : edges[i + 1]] for i in range(self.rank, len(edges) - 1, self.world_size)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        packs = self.pack_samples()
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for number in range(self.first_pack + turn, len(packs), workers):
            yield self._pack(number, packs[number])

    def _pack(self, number: int, indices: NDArray[np.int64]) -> dict[str, Any]:
        items = [self.dataset[int(i)] for i in indices]
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        pack: dict[str, Any] = {
            name: torch.cat([item[name] for item in items])
            for name, value in items[0].items()
            if isinstance(value, Tensor)
        }
        if self._post_norm is not None and "post_norm" not in pack:
            pack["post_norm"] = self._post_norm.rows(pack["pre_norm"])
        pack["segment_ids"] = torch.repeat_interleave(torch.arange(len(items), dtype=torch.int32), lengths)
        pack["position_ids"] = torch.cat([torch.arange(int(length)) for length in lengths])
        pack["sample_indices"] = torch.from_numpy(indices.copy())
        pack["pack"] = number
        return pack


class PackLoader:
    """Packs for a training loop, with the place in the epoch that the loop has come to.

    Iterating gives the rest of the current epoch and then moves to the next, so `for epoch in range(3): for pack in loader`
    reads three epochs. `state_dict()` speaks of the packs that were handed out, not of what workers have read ahead: loaded
    into a loader of the same packs, it goes on with exactly the packs that were still to come.
    """

    def __init__(self, packs: PackedDataset, *, num_workers: int = 0) -> None:
        self.packs = packs
        self._num_workers = num_workers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for pack in DataLoader(self.packs, batch_size=None, num_workers=self._num_workers):
            # Moved before the pack is handed out: a loop that saves its state while it has this pack goes on with the next.
            self.packs.first_pack = pack["pack"] + 1
            yield pack
        self.packs.epoch += 1
        self.packs.first_pack = 0

    def state_dict(self) -> dict[str, int]:
        """The place, and what the packs were made from."""
        return {**_made_from(self.packs), "epoch": self.packs.epoch, "first_pack": self.packs.first_pack}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to the place of `state`; UsageError where it speaks of other packs."""
        expected = _made_from(self.packs)
        different = [
            f"{name} is {value}, was {state.get(name)}" for name, value in expected.items() if state.get(name) != value
        ]
        if different:
            raise UsageError(
                f"the state is one of other packs: {', '.join(different)}. Use the settings it was made with."
            )
        self.packs.epoch, self.packs.first_pack = state["epoch"], state["first_pack"]


def pack_edges(lengths: NDArray[np.int64], token_budget: int) -> NDArray[np.int64]:
    """Where packs begin when samples of these lengths are laid down in turn, and the end: (packs + 1,) places."""
    ends = np.cumsum(lengths)
    edges = [0]
    while edges[-1] < len(lengths):
        before = ends[edges[-1] - 1] if edges[-1] else 0
        edges.append(int(np.searchsorted(ends, before + token_budget, side="right")))
    return np.array(edges, np.int64)


def _made_from(packs: PackedDataset) -> dict[str, int]:
    return {
        "samples": len(packs.dataset),
        "rows": int(packs.dataset.lengths.sum()),
        "token_budget": packs.token_budget,
        "seed": packs.seed,
        "window": packs.window,
        "world_size": packs.world_size,
    }


def _check_numbers(seed: int, window: int, rank: int, world_size: int) -> None:
    if seed < 0 or window < 1:
        raise UsageError(f"seed must be 0 or more and window 1 or more, got {seed} and {window}.")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank must be one of 0..{world_size - 1} (world_size {world_size}), got {rank}.")


def _check_lengths(lengths: NDArray[np.int64], token_budget: int) -> None:
    if len(lengths) and lengths.max() > token_budget:
        longest = int(lengths.argmax())
        raise UsageError(
            f"sample {longest} has {lengths[longest]} rows and a pack takes {token_budget}; give a token budget of at least "
            "the longest sample, or capture with a smaller --max-length."
        )
