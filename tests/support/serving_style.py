"""A model in the style of serving engines: each layer returns ``(hidden, residual)`` and the next norm adds the two, in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


class AddingNorm(nn.Module):
    """An RMS norm that first adds its input to the residual, in the residual's own memory, and returns both."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H) + torch.randn(H) * 0.1)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return self._normed(x)
        residual.add_(x)
        return self._normed(residual), residual

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ServingLayer(nn.Module):
    def __init__(self, H: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = AddingNorm(H), AddingNorm(H)
        self.qkv_proj, self.o_proj = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.up_proj, self.down_proj = nn.Linear(H, 2 * H, bias=False), nn.Linear(2 * H, H, bias=False)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        q, k, v = (x[:, None] for x in self.qkv_proj(hidden_states).chunk(3, -1))
        attended = self.o_proj(scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        hidden_states, residual = self.post_attention_layernorm(attended, residual)
        return self.down_proj(silu(self.up_proj(hidden_states))), residual


class ServingModel(nn.Module):
    _no_split_modules = ("ServingLayer",)

    def __init__(self, H: int = 32, n: int = 4, V: int = 96) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=H, num_hidden_layers=n)
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = nn.ModuleList(ServingLayer(H) for _ in range(n))
        self.norm = AddingNorm(H)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1])
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


def build(*, seed: int = 0) -> ServingModel:
    torch.manual_seed(seed)
    return ServingModel().eval()
