"""A model of somebody's own code: names that tell nothing, no marks, a config that states no depth.

`parts` are its five blocks, one of which runs twice; `extras` is a longer list of small blocks that are used one per block
and then some, and feed nothing to each other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Mixing(nn.Module):
    """Adds the running mean of what came before: causal, and cheap."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return self.inner(x.cumsum(1) / counts)


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Mixing(width)
        self.second = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Any:
        x = x + self.first(x)
        return (x + self.second(x), None)


class Neutral(nn.Module):
    def __init__(self, width: int = 32, rows: int = 96) -> None:
        super().__init__()
        self.config = SimpleNamespace(name="neutral")
        self.table = nn.Embedding(rows, width)
        self.parts = nn.ModuleList(Unit(width) for _ in range(5))
        self.extras = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(9))
        self.ending = nn.LayerNorm(width)
        self.out = nn.Linear(width, rows, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        gate = torch.ones_like(x)
        for i, part in enumerate(self.parts):
            (x, _) = part(x)
            if i == 3:
                (x, _) = part(x)
            gate = gate * self.extras[i](self.table(ids))
        return self.out(self.ending(x) * gate)


def build(*, seed: int = 0) -> Neutral:
    torch.manual_seed(seed)
    model = Neutral()
    with torch.no_grad():
        model.ending.weight.add_(torch.randn_like(model.ending.weight) * 0.2)
    return model.eval()
