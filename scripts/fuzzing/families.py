"""The families that draws are made of: where their decoder layers are, and which config fields vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import nn

from support import architectures

Fields = dict[str, Any]
Vary = Callable[[Random], Fields]

LIMIT_NAMES = (
    "sliding_window", "attention_chunk_size", "original_max_position_embeddings", "max_position_embeddings",
    "index_topk", "window_size", "attention_window_size", "mamba_chunk_size", "chunk_size", "canvas_length",
)  # fmt: skip
LONGEST = 72


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        model_type: as in transformers' configs.
        path: where its decoder layers are.
        vary: random config fields on top of the tiny ones.
        ordinary: its rows are a plain causal stream, so one unpadded sample must run and not be refused.
    """

    model_type: str
    path: str = "model.layers"
    vary: Vary = lambda _: {}
    ordinary: bool = True

    def build(self, fields: Mapping[str, Any], seed: int) -> nn.Module:
        """A tiny random model with random weights, in eval mode."""
        return architectures.build(self.model_type, seed=seed, **fields)


def limits_of(config: Any) -> tuple[int, ...]:
    """The lengths that a config names, as far as a draw may reach them."""
    parts = [config, *(getattr(config, name, None) for name in (getattr(config, "sub_configs", None) or {}))]
    found = {getattr(part, name, None) for part in parts for name in LIMIT_NAMES}
    for part in parts:
        found |= set(_numbers(getattr(part, "rope_parameters", None)))
    return tuple(sorted(n for n in found if isinstance(n, int) and 2 <= n <= LONGEST - 8))


def _numbers(rope: Any) -> list[int]:
    if not isinstance(rope, dict):
        return []
    return [n for v in rope.values() if isinstance(v, dict) for n in _numbers(v)] + [
        rope["original_max_position_embeddings"] for _ in [0] if "original_max_position_embeddings" in rope
    ]


def rope(rng: Random, *, frequencies: int = 4) -> Fields:
    """Any rope type of transformers, with a small original length; `frequencies`: half the rotated width."""
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
    original = rng.choice([16, 24, 40])
    given: Fields = {"rope_type": kind, "rope_theta": 10000.0}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        given["factor"] = rng.choice([2.0, 4.0])
    if kind in ("yarn", "longrope", "llama3"):
        given["original_max_position_embeddings"] = original
    if kind == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        given |= {"short_factor": [1.0] * frequencies, "long_factor": [1.0 + 2 * i for i in range(1, frequencies + 1)]}
        given["factor"] = 4.0
    fields: Fields = {"rope_parameters": given}
    if kind == "dynamic":
        fields["max_position_embeddings"] = original
    return fields


def _longrope(rng: Random) -> Fields:
    original = rng.choice([16, 24, 40])
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    given = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return {
        "original_max_position_embeddings": original,
        "max_position_embeddings": 4 * original,
        "rope_parameters": given | {"original_max_position_embeddings": original},
    }


def _phimoe(rng: Random) -> Fields:
    fields = _longrope(rng)
    fields["rope_parameters"] |= {"short_mscale": 1.1, "long_mscale": 1.3}
    return fields


def _roped(**choices: list[Any]) -> Vary:
    """Random rope, and one value of each of `choices`."""
    return lambda rng: rope(rng) | _picked(rng, choices)


def _choosing(**choices: list[Any]) -> Vary:
    return lambda rng: _picked(rng, choices)


def _picked(rng: Random, choices: Mapping[str, list[Any]]) -> Fields:
    return {name: rng.choice(values) for name, values in choices.items()}


_WINDOWS = [4, 8, 17]
_NO_DECODER = [False, True]
_S, _F = "sliding_attention", "full_attention"
_LAYERS = [[_S, _F, _S, _F], [_F, _S, _S, _F], [_S] * 4]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        # One rotary embedding: every rope type.
        Family("llama", vary=_roped(attention_bias=[False, True], mlp_bias=[False, True], num_key_value_heads=[1, 2, 4])),
        Family("mistral", vary=_roped(sliding_window=[None, *_WINDOWS])),
        Family("qwen2", vary=_roped(use_sliding_window=[False, True], sliding_window=_WINDOWS, max_window_layers=[0, 2])),
        Family("qwen3", vary=_roped(attention_bias=[False, True])),
        Family("phi3", vary=_longrope),
        Family("phimoe", vary=_phimoe),
        Family("olmo", vary=_roped(clip_qkv=[None, 0.5])),
        Family("olmo2", vary=_roped()),
        Family("granite", vary=_roped(embedding_multiplier=[1.0, 3.0], residual_multiplier=[1.0, 0.5])),
        Family("smollm3", vary=_roped(no_rope_layer_interval=[2, 4])),
        Family("starcoder2", vary=_roped(sliding_window=[None, *_WINDOWS])),
        Family("stablelm", vary=_choosing(use_parallel_residual=[False, True], qk_layernorm=[False, True])),
        Family("seed_oss", vary=_roped()),
        Family("arcee", vary=_roped()),
        Family("nemotron"),
        Family("persimmon"),
        Family("cohere", vary=_roped(use_qk_norm=[False, True])),
        Family("cohere2", vary=_choosing(sliding_window=_WINDOWS, layer_types=_LAYERS)),
        Family("gemma", vary=_roped()),
        Family("gemma2", vary=_choosing(sliding_window=_WINDOWS, attn_logit_softcapping=[None, 20.0])),
        Family(
            "gemma3_text",
            vary=_choosing(sliding_window=_WINDOWS, layer_types=_LAYERS, use_bidirectional_attention=[False, False, True]),
        ),
        Family("gemma4_text"),
        Family("exaone4", vary=_choosing(sliding_window=_WINDOWS, layer_types=_LAYERS)),
        Family("olmo3", vary=_choosing(sliding_window=_WINDOWS, layer_types=_LAYERS)),
        Family("ministral", vary=_choosing(sliding_window=_WINDOWS, layer_types=_LAYERS)),
        Family("modernbert-decoder", vary=_choosing(local_attention=[8, 16])),
        Family("nanochat"),
        Family("diffllama"),
        Family("glm4"),
        Family("minicpm3"),
        Family("phi", vary=_choosing(partial_rotary_factor=[0.5, 1.0])),
        Family("gpt_neox", "gpt_neox.layers", vary=_choosing(use_parallel_residual=[False, True])),
        Family("gptj", "transformer.h"),
        Family("codegen", "transformer.h"),
        # Experts.
        Family("mixtral", vary=_roped(sliding_window=[None, *_WINDOWS], num_local_experts=[2, 4])),
        Family("qwen2_moe", vary=_roped(decoder_sparse_step=[1, 2])),
        Family("qwen3_moe", vary=_roped(norm_topk_prob=[False, True])),
        Family("olmoe", vary=_roped()),
        Family("gpt_oss", vary=_choosing(sliding_window=_WINDOWS, layer_types=_LAYERS)),
        Family("deepseek_v2", vary=_choosing(first_k_dense_replace=[0, 1])),
        Family("deepseek_v3", vary=_choosing(first_k_dense_replace=[0, 1], n_routed_experts=[4, 8])),
        Family("deepseek_v32", vary=_choosing(index_topk=[4, 8, 16])),
        Family("glm_moe_dsa", vary=_choosing(index_topk=[4, 8, 16])),
        Family("glm4_moe"),
        Family("granitemoe", vary=_roped()),
        Family("ernie4_5_moe"),
        Family("jetmoe"),
        Family("dbrx", "transformer.blocks", vary=_choosing(tie_word_embeddings=[False])),
        Family("minimax_m2"),
        Family("longcat_flash"),
        Family("llama4_text", vary=_choosing(attention_chunk_size=_WINDOWS, no_rope_layers=[[1, 0, 1, 0], [1, 1, 1, 0]])),
        # Absolute or biased positions, parallel blocks.
        Family("gpt2", "transformer.h"),
        Family("gpt_neo", "transformer.h", vary=_choosing(window_size=_WINDOWS)),
        Family("gpt_bigcode", "transformer.h", vary=_choosing(multi_query=[False, True])),
        Family("openai-gpt", "transformer.h"),
        Family("ctrl", "transformer.h"),
        Family("opt", "model.decoder.layers", vary=_choosing(do_layer_norm_before=[False, True])),
        Family("xglm"),
        Family("biogpt", "biogpt.layers"),
        Family("bloom", "transformer.h", vary=_choosing(apply_residual_connection_post_layernorm=[False, True])),
        Family("mpt", "transformer.blocks"),
        Family(
            "falcon", "transformer.h",
            vary=_choosing(alibi=[False, True], parallel_attn=[False, True], multi_query=[False, True]),
        ),
        Family("bart", "model.decoder.layers"),
        Family("bert", "bert.encoder.layer", vary=_choosing(is_decoder=_NO_DECODER), ordinary=False),
        Family("roberta", "roberta.encoder.layer", vary=_choosing(is_decoder=_NO_DECODER), ordinary=False),
        Family("electra", "electra.encoder.layer", vary=_choosing(is_decoder=_NO_DECODER), ordinary=False),
        Family("roformer", "roformer.encoder.layer", vary=_choosing(is_decoder=_NO_DECODER), ordinary=False),
        # Recurrent and hybrid.
        Family("mamba", "backbone.layers"),
        Family("mamba2", "backbone.layers"),
        Family("falcon_mamba", "backbone.layers"),
        Family("rwkv", "rwkv.blocks", ordinary=False),
        Family("xlstm", "backbone.blocks"),
        Family("recurrent_gemma"),
        Family("jamba"),
        Family("bamba"),
        Family("zamba2"),
        Family("falcon_h1"),
        Family("nemotron_h"),
        Family("granitemoehybrid"),
        Family("lfm2"),
        Family("qwen3_next"),
        Family("qwen3_5_text"),
        Family("kimi_linear"),
        Family("minimax"),
        Family("olmo_hybrid"),
        # Odd ones.
        Family("xlnet", "transformer.layer", ordinary=False),
        Family("reformer", "reformer.encoder.layers", ordinary=False),
        Family("cpmant", "cpmant.encoder.layers", ordinary=False),
        Family("prophetnet", "prophetnet.decoder.layers", ordinary=False),
        Family("deepseek_v4", ordinary=False),
        Family("mllama", ordinary=False),
        Family("paligemma", "model.language_model.layers", ordinary=False),
        Family("diffusion_gemma", "model.decoder.layers", ordinary=False),
        Family("moshi", ordinary=False),
        Family("whisper", "model.decoder.layers", ordinary=False),
    )
}  # fmt: skip
