"""The ways in which a model or its layers are given to ``torch.compile``, and what dynamo counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import CausalLMOutput

from .neutral_names import Unit


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(Unit(32) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            (x, _) = layer(x)
        return self.norm(x)


class Small(nn.Module):
    """Four layers that dynamo traces in a moment."""

    _no_split_modules = ("Unit",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Blocks()
        self.head = nn.Linear(32, 96, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.table

    def forward(self, ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.model(ids)))


@torch.no_grad()
def states_of_small(ids: Tensor) -> list[Tensor]:
    """Boundaries 0..4 and post-norm of `Small`, layer by layer, without any hook."""
    blocks = Small().model
    states = [blocks.table(ids)]
    for layer in blocks.layers:
        states.append(layer(states[-1])[0])
    return [*states, blocks.norm(states[-1])]


def in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def wrapped(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_a_function(model: nn.Module) -> Any:
    return torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="eager")


def each_layer_in_place(model: nn.Module) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def each_layer_wrapped(model: nn.Module) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


WHOLE: dict[str, Callable[[nn.Module], Any]] = {"model.compile()": in_place, "torch.compile(model)": wrapped}
BY_LAYER: dict[str, Callable[[nn.Module], Any]] = {
    "layer.compile()": each_layer_in_place,
    "torch.compile(layer)": each_layer_wrapped,
}


def graphs() -> int:
    """How many graphs dynamo made since the counters were cleared: one more is a recompilation."""
    return int(counters["stats"]["unique_graphs"])


def start_afresh() -> None:
    torch._dynamo.reset()
    counters.clear()
