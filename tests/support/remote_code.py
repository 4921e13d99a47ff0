"""A double of modelling code that comes with a checkpoint, in the form before transformers 4.56 (Kimi K2's): a layer returns
``(hidden_states, attention map, cache)`` and the model takes item 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class DeepseekV3DecoderLayer(nn.Module):
    def __init__(self, H: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(H), nn.LayerNorm(H)
        self.q_proj, self.kv_proj = nn.Linear(H, H, bias=False), nn.Linear(H, 2 * H, bias=False)
        self.mlp = nn.Sequential(nn.Linear(H, 2 * H), nn.SiLU(), nn.Linear(2 * H, H))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, output_attentions: bool = True, **_: Any
    ) -> tuple[Tensor, Tensor, Any]:
        normed = self.input_layernorm(hidden_states)
        keys, values = self.kv_proj(normed).chunk(2, -1)
        weights = (self.q_proj(normed) @ keys.transpose(1, 2) + attention_mask).softmax(-1)
        hidden_states = hidden_states + weights @ values
        cache = SimpleNamespace(keys=keys)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), weights[:, None], cache


class DeepseekV3Model(nn.Module):
    def __init__(self, H: int, n: int, V: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = nn.ModuleList(DeepseekV3DecoderLayer(H) for _ in range(n))
        self.norm = nn.LayerNorm(H)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states, S = self.embed_tokens(input_ids), input_ids.shape[1]
        mask = torch.full((S, S), -1e9).triu(1)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask)[0]
        return self.norm(hidden_states)


class DeepseekV3ForCausalLM(nn.Module):
    _no_split_modules = ("DeepseekV3DecoderLayer",)

    def __init__(self, H: int = 32, n: int = 4, V: int = 96) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=H, num_hidden_layers=n, model_type="kimi_k2")
        self.model = DeepseekV3Model(H, n, V)
        self.lm_head = nn.Linear(H, V, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))


def build(*, seed: int = 0) -> DeepseekV3ForCausalLM:
    torch.manual_seed(seed)
    return DeepseekV3ForCausalLM().eval()
