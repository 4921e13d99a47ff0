"""Packs: whole samples end to end, up to a budget of tokens, in a shuffled order that can be gone on with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

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
Uneven = Literal["pad", "drop", "keep"]


class PackedDataset(IterableDataset[dict[str, Any]]):
    """Packs of the samples of `dataset`, from `first_pack` of `epoch` to the epoch's end.

    A pack is a dict over its T <= token_budget rows and M samples: every row column of the dataset end to end (input_ids (T,)
    int64, loss_mask (T,), aux_hidden_states (T, K, H), ...), segment_ids (T,) int32 (0..M-1: which of the pack's samples),
    position_ids (T,) int64 (counted within each sample), sample_indices (M,) int64 (into `dataset`), and `pack`, its number.

    Every rank computes the same packs from the lengths alone and takes every world_size-th; DataLoader workers take a rank's
    packs in turns, so the order does not depend on the number of workers. All ranks have the same number of packs, since a
    training loop with collectives hangs on the rank that has one more; `uneven` chooses how.

    `len()` is the number of this rank's packs in the current epoch; epochs, which pack samples in other orders, may differ
    by a few.

    Args:
        dataset: the samples.
        token_budget: most rows of a pack.
        seed: each epoch has an order of its own, derived from it.
        window: how many samples are mixed at a time; see `epoch_order`.
        rank, world_size: which share of the packs, of how many.
        uneven: where world_size does not divide the packs: ``pad`` gives the last ranks the epoch's first packs again, ``drop``
            leaves the last packs out, ``keep`` lets ranks differ by one pack, with each sample exactly once (for evaluation).
        post_norm: adds the column post_norm, computed from pre_norm.

    Raises:
        UsageError: a sample longer than the budget, or numbers out of range.

    Example:
        >>> packs = PackedDataset(CapturedDataset("OUT"), 256, rank=0, world_size=2)
        >>> pack = next(iter(packs))
        >>> pack["aux_hidden_states"].shape[1:], pack["position_ids"][:3]
        (torch.Size([3, 32]), tensor([0, 1, 2]))
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
        uneven: Uneven = "pad",
        post_norm: PostNorm | None = None,
    ) -> None:
        _check_numbers(seed, window, rank, world_size)
        if uneven not in get_args(Uneven):
            raise UsageError(f"uneven must be one of {', '.join(get_args(Uneven))}; got {uneven!r}.")
        _check_lengths(dataset.lengths, token_budget)
        if post_norm is not None:
            post_norm.require_columns(dataset)
        self.dataset = dataset
        self.token_budget = token_budget
        self.seed = seed
        self.window = window
        self.rank = rank
        self.world_size = world_size
        self.uneven: Uneven = uneven
        self.epoch = 0
        self.first_pack = 0
        self._post_norm = post_norm

    def pack_samples(self) -> list[NDArray[np.int64]]:
        """Return the sample indices of each pack of this rank in the current epoch."""
        bits = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)[0])
        order = epoch_order(self.dataset.places.shard_of, self.dataset.places.position, self.window, bits)
        edges = pack_edges(self.dataset.lengths[order], self.token_budget)
        count = len(edges) - 1
        numbers = range(self.rank, _shared_count(count, self.world_size, self.uneven), self.world_size)
        return [order[edges[i % count] : edges[i % count + 1]] for i in numbers]

    def __len__(self) -> int:
        return len(self.pack_samples())

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
            pack["post_norm"] = self._post_norm(pack["pre_norm"])
        pack["segment_ids"] = torch.repeat_interleave(torch.arange(len(items), dtype=torch.int32), lengths)
        pack["position_ids"] = torch.cat([torch.arange(int(length)) for length in lengths])
        pack["sample_indices"] = torch.from_numpy(indices.copy())
        pack["pack"] = number
        return pack


class PackLoader:
    """Packs for a training loop, with its place in the epoch as a state dict.

    Iterating gives the current epoch and then moves to the next, so `for epoch in range(3): for pack in loader` reads three
    epochs. An iteration that is broken off moves nothing: the next one begins where it began. `state_dict()` counts the packs
    that the latest iteration handed out, not those that workers have prefetched: a loader of the same packs that loads it resumes
    with exactly the packs that were still to come.

    `len()` is the number of packs of the current epoch.

    Args:
        packs: the packs to hand out.
        num_workers: processes that prefetch; 0 reads in this one.

    Example:
        >>> loader = PackLoader(PackedDataset(CapturedDataset("OUT"), 256))
        >>> for pack in loader:
        ...     checkpoint = loader.state_dict()
        >>> checkpoint["epoch"], checkpoint["first_pack"] == len(loader)
        (0, True)
    """

    def __init__(self, packs: PackedDataset, *, num_workers: int = 0) -> None:
        self.packs = packs
        self._num_workers = num_workers
        self._handed_out = packs.first_pack

    def __len__(self) -> int:
        return len(self.packs)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._handed_out = self.packs.first_pack
        for pack in DataLoader(self.packs, batch_size=None, num_workers=self._num_workers):
            # Moved before the pack is handed out: a loop that saves its state while it has this pack goes on with the next.
            self._handed_out = pack["pack"] + 1
            yield pack
        self.packs.epoch += 1
        self.packs.first_pack = self._handed_out = 0

    def state_dict(self) -> dict[str, int | str]:
        """Return the place as JSON values, and the settings of the packs."""
        return {**_made_from(self.packs), "epoch": self.packs.epoch, "first_pack": self._handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the place of `state`; raise UsageError where it is of other packs."""
        expected = _made_from(self.packs)
        # States of versions without `uneven` have packs shared out as `keep` does.
        known = {"uneven": "keep", **state}
        different = [
            f"{name} is {value}, was {known.get(name)}"
            for name, value in expected.items()
            if known.get(name) != value and not (name == "uneven" and self.packs.world_size == 1)
        ]
        if different:
            raise UsageError(
                f"the state is one of other packs: {', '.join(different)}. Use the settings it was made with."
            )
        self.packs.epoch = state["epoch"]
        self.packs.first_pack = self._handed_out = state["first_pack"]


def pack_edges(lengths: NDArray[np.int64], token_budget: int) -> NDArray[np.int64]:
    """Return (packs + 1,) row offsets of packs that hold samples of these lengths in turn."""
    ends = np.cumsum(lengths)
    edges = [0]
    while edges[-1] < len(lengths):
        before = ends[edges[-1] - 1] if edges[-1] else 0
        edges.append(int(np.searchsorted(ends, before + token_budget, side="right")))
    return np.array(edges, np.int64)


def _shared_count(packs: int, world_size: int, uneven: Uneven) -> int:
    """Return how many packs the ranks take in all, the padding's included."""
    if uneven == "pad" and packs:
        return math.ceil(packs / world_size) * world_size
    return packs // world_size * world_size if uneven == "drop" else packs


def _made_from(packs: PackedDataset) -> dict[str, int | str]:
    return {
        "samples": len(packs.dataset),
        "rows": int(packs.dataset.lengths.sum()),
        "token_budget": packs.token_budget,
        "seed": packs.seed,
        "window": packs.window,
        "world_size": packs.world_size,
        "uneven": packs.uneven,
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
