"""A small double of Kimi K3's text model: attention residuals in blocks, as its published modelling file has them.

A layer takes the running sum of its block and the completed blocks, and returns both. Its attention and its MLP each read a
mixture: softmax attention over the completed blocks and the running sum, scored by a learnt direction. The layer that starts
a block first puts the running sum away as a completed block. The model mixes once more, by weights of its own, before its
final norm. Attention itself is a plain causal one here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast


class KimiK3Config(PreTrainedConfig):
    model_type = "kimi_k3_double"

    vocab_size: int = 96
    hidden_size: int = 32
    num_hidden_layers: int = 6
    attn_res_block_size: int = 2
    rms_norm_eps: float = 1e-5


class KimiRMSNorm(nn.Module):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.variance_epsilon = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


def mixture(prefix_sum: Tensor, block_residual: Tensor, proj: nn.Linear, norm: KimiRMSNorm) -> Tensor:
    """(B, S, H) from a running sum (B, S, H) and completed blocks (B * S, K, H), in float32."""
    flat = prefix_sum.reshape(-1, prefix_sum.shape[-1])
    values = torch.cat([block_residual, flat[:, None]], 1).float()
    keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    scores = (keys * (norm.weight.float() * proj.weight[0].float())).sum(-1)
    return (scores.softmax(-1)[:, None] @ values)[:, 0].to(prefix_sum.dtype).view_as(prefix_sum)


def allowed_positions(input_ids: Tensor, attention_mask: Tensor | None, held: int) -> Tensor:
    """(B or 1, 1, S, held + S) bool: what each position may attend to. Attention here knows no positions, only order."""
    S = input_ids.shape[1]
    causal = torch.ones(S, held + S, dtype=torch.bool).tril(held)[None, None]
    if attention_mask is None:
        return causal
    return causal & (attention_mask[:, None, None] != 0) | torch.eye(held + S, dtype=torch.bool)[held:]


class KimiAttention(nn.Module):
    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, cache: Cache | None, allowed: Tensor) -> Tensor:
        q, k, v = (x[:, None] for x in self.qkv(hidden_states).chunk(3, -1))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return self.o_proj(scaled_dot_product_attention(q, k, v, attn_mask=allowed)[:, 0])


class KimiMLP(nn.Module):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down(silu(self.up(hidden_states)))


class KimiDecoderLayer(nn.Module):
    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        self.starts_block = layer_idx % config.attn_res_block_size == 0
        self.self_attn, self.mlp = KimiAttention(config, layer_idx), KimiMLP(config)
        self.input_layernorm, self.post_attention_layernorm = KimiRMSNorm(config), KimiRMSNorm(config)
        self.self_attention_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.self_attention_res_norm = KimiRMSNorm(config)
        self.mlp_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.mlp_res_norm = KimiRMSNorm(config)

    def forward(
        self, hidden_states: Tensor, *, block_residual: Tensor, cache: Cache | None, allowed: Tensor
    ) -> tuple[Tensor, Tensor]:
        running: Tensor | None = hidden_states
        if block_residual.shape[1]:
            hidden_states = mixture(
                hidden_states, block_residual, self.self_attention_res_proj, self.self_attention_res_norm
            )
        if self.starts_block:
            block_residual = torch.cat([block_residual, running.reshape(-1, 1, running.shape[-1])], 1)
            running = None
        attended = self.self_attn(self.input_layernorm(hidden_states), cache, allowed)
        running = attended if running is None else running + attended
        mixed = mixture(running, block_residual, self.mlp_res_proj, self.mlp_res_norm)
        return running + self.mlp(self.post_attention_layernorm(mixed)), block_residual


class KimiK3PreTrainedModel(PreTrainedModel):
    config_class = KimiK3Config
    base_model_prefix = "model"
    _no_split_modules: ClassVar = ["KimiDecoderLayer"]


class KimiK3Model(KimiK3PreTrainedModel):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KimiDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = KimiRMSNorm(config)
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.output_attn_res_norm = KimiRMSNorm(config)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        allowed = allowed_positions(input_ids, attention_mask, 0 if cache is None else cache.get_seq_length())
        blocks = hidden_states.new_empty(input_ids.numel(), 0, hidden_states.shape[-1])
        for layer in self.layers:
            hidden_states, blocks = layer(hidden_states, block_residual=blocks, cache=cache, allowed=allowed)
        hidden_states = mixture(hidden_states, blocks, self.output_attn_res_proj, self.output_attn_res_norm)
        return self.norm(hidden_states)


class KimiK3ForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids, attention_mask, past_key_values))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def build(*, seed: int = 0, **fields: int) -> KimiK3ForCausalLM:
    torch.manual_seed(seed)
    model = KimiK3ForCausalLM(KimiK3Config(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()
