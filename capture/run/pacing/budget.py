"""The budget of positions per forward, tried out on the run's own first batches so that no work is wasted.

The layout of a shard does not depend on its batches, so they may change size from one to the next.
"""

from __future__ import annotations

import statistics

import torch

# Sizes worth trying. On CPUs the best was 2048 on one machine and 4096 on another; accelerators want more.
CPU_SIZES = (1024, 2048, 4096)
ACCELERATOR_SIZES = (4096, 8192, 16384, 32768)
TRIES = 3


class TokenBudget:
    """The budget of the next batch; learns from how long each one took.

    It is settled once every size was tried often enough; with one size that still takes a few batches, to know its speed.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._seconds_per_token: dict[int, list[float]] = {size: [] for size in sizes}
        self._unused: dict[int, int] = {}
        self._settled_on: int | None = None

    @classmethod
    def fixed(cls, size: int) -> TokenBudget:
        return cls((size,))

    @classmethod
    def probing(cls, device: torch.device) -> TokenBudget:
        return cls(CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES)

    @classmethod
    def known(cls, size: int, seconds_per_token: float) -> TokenBudget:
        """Return a budget settled in an earlier run."""
        budget = cls((size,))
        budget._seconds_per_token[size] = [seconds_per_token]
        budget._settled_on = size
        return budget

    def again(self) -> TokenBudget:
        """Return a budget over the same sizes without measurements."""
        return TokenBudget(self.sizes)

    @property
    def settled(self) -> bool:
        return self._settled_on is not None

    @property
    def chosen(self) -> int | None:
        """Return the final size of every batch, or None while sizes are still tried."""
        return self._settled_on if len(self.sizes) > 1 else self.sizes[0]

    @property
    def seconds_per_token(self) -> float | None:
        """Return the median of the chosen size."""
        return None if self._settled_on is None else statistics.median(self._seconds_per_token[self._settled_on])

    def next(self) -> int:
        """Positions of the next batch: each size in turn until all were seen often enough."""
        if self._settled_on is not None:
            return self._settled_on
        return min(self._seconds_per_token, key=lambda size: len(self._seconds_per_token[size]))

    def observe(self, size: int, tokens: int, positions: int, seconds: float) -> None:
        """Note that a batch made under budget `size` took `seconds`.

        A batch that could not use half of its budget (few samples were left) says nothing about that size; a size that none of
        several batches could use is given up.
        """
        if self.settled or size not in self._seconds_per_token:
            return
        if positions < size // 2 and len(self._seconds_per_token) > 1:
            self._unused[size] = self._unused.get(size, 0) + 1
            if self._unused[size] > TRIES and size != min(self._seconds_per_token):
                del self._seconds_per_token[size]
            return
        self._seconds_per_token[size].append(seconds / tokens)
        if all(len(seen) >= TRIES for seen in self._seconds_per_token.values()):
            # Other work on the machine only ever adds time, so the shortest of few tries says most about a size.
            self._settled_on = min(self._seconds_per_token, key=lambda s: min(self._seconds_per_token[s]))

    def limit(self, failed: int) -> None:
        """Drop all sizes from `failed` positions on, which did not fit the device; halve `failed` if none is left."""
        fitting = {size: seen for size, seen in self._seconds_per_token.items() if size < failed}
        self._seconds_per_token = fitting or {failed // 2: []}
        self.sizes = tuple(self._seconds_per_token)
        if self._settled_on not in self._seconds_per_token:
            self._settled_on = None
