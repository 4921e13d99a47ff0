"""Tiny configs for any model type of transformers: a table of small sizes, and what some types need besides.

H = 32 and n = 4 wherever the type allows; token ids that a config gives a role to lie outside 8..79.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

CAUSAL_LMS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT_MODELS: tuple[str, ...] = tuple(
    name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)

SMALL: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 4),
    **dict.fromkeys(["encoder_layers", "depth"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "swa_num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "swa_head_dim", "query_pre_attn_scalar", "rotary_dim"], 8),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "d_inner"], 64),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 256),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"], 32),
    **dict.fromkeys(["expert_ffn_hidden_size", "ffn_hidden_size"], 32),
    **dict.fromkeys(["n_routed_experts", "num_experts", "num_local_experts", "zero_expert_num"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "index_head_dim", "o_lora_rank"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **dict.fromkeys(["sliding_window", "sliding_window_size", "rel_extent", "mamba_chunk_size", "chunk_size"], 8),
    **dict.fromkeys(["index_topk", "d_rel"], 4),
    **dict.fromkeys(["index_n_heads", "o_groups", "n_layers_per_attn_res_block"], 2),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_heads", "mamba_n_heads"], 4),
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 8),
    "vocab_size": 96, "unpadded_vocab_size": 96, "linear_num_key_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "expand": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3, "cls_token_id": 4,
    "decoder_start_token_id": 5, "image_token_id": 90, "image_token_index": 90, "video_token_id": 91,
    "audio_token_id": 92, "boi_token_id": 85, "boi_token_index": 85, "eoi_token_id": 86, "eoi_token_index": 86,
    "boa_token_id": 87, "eoa_token_id": 88, "eoa_token_index": 88, "vision_start_token_id": 83,
    "vision_end_token_id": 84, "patch_size": 4, "image_size": 16, "out_hidden_size": 32, "projection_dim": 32,
}  # fmt: skip

_MHA = {"num_key_value_heads": 4}
_HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_GEMMA4 = {
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
    "layer_types": _SLIDING, "global_head_dim": 8,
}  # fmt: skip
_GEMMA4_PLAIN = {"hidden_size_per_layer_input": 0, "layer_types": _SLIDING}
_GEMMA3N = {
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "laurel_rank": 4,
    "layer_types": _SLIDING, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
_QWEN4 = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "hc_lowrank": 8,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ple_layer_ids": [2], "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "heads_per_ngram": 2,
}  # fmt: skip
_BLT_PART = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
    "num_hidden_layers": 2, "max_position_embeddings": 256,
}  # fmt: skip
_BLT_LOCAL = {**_BLT_PART, "vocab_size": 260, "hidden_size_global": 32, "cross_attn_k": 1, "sliding_window": None}
_DOTS3 = {
    **_MHA,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_KOSMOS = {"layers": 4, "embed_dim": 32, "attention_heads": 4}
_MLLAMA = {"cross_attention_layers": [1]}
_MROPE = {"rope_parameters": _ROPE}
_VLM = {"text_config": _MROPE}
_ZAMBA = {
    "num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
    "num_key_value_heads": 4,
}  # fmt: skip

FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
            "longcat_flash", "minicpm3", "sarvam_mla", "youtu", "mistral4", "mistral_large4_text",
        ],
        _MHA,
    ),
    "bailing_hybrid": {**_MHA, "layer_types": _HYBRID},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "vocab_size": 260, "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3], "cross_attn_k": 1,
        "patcher_config": {**_BLT_PART, "vocab_size": 260, "sliding_window": None},
        "encoder_config": _BLT_LOCAL, "decoder_config": _BLT_LOCAL,
        "global_config": {**_BLT_PART, "num_hidden_layers": 4},
    },
    "cohere_compass_text": {
        "layer_types": _SLIDING, "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "cpmant": {
        "prompt_types": 8, "prompt_length": 4, "dim_head": 8, "dim_ff": 64, "segment_types": 4,
        "position_bias_num_buckets": 16, "position_bias_max_distance": 64,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": {
        "text_config": _DOTS3, "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
        "vision_config": {"pyramid_num_routed": [-1, -1, 4, 4], "adapter_in_dim": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": {"text_config": _GEMMA3N}, "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4}, "gemma4_text": _GEMMA4,
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text", **_GEMMA4_PLAIN, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4,
        },
        "backbone_hidden_size": 32, "num_centroids": 8, "centroid_intermediate_top_k": 4,
    },
    "gemma4_unified": {"text_config": _GEMMA4_PLAIN}, "gemma4_unified_text": _GEMMA4_PLAIN,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _HYBRID, "position_embedding_type": "rope"},
    "inkling2_loop_text": {
        "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_gate_rank": 4, "num_hidden_layers": 6,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_MHA, "layer_types": _HYBRID},
    "kosmos-2": {"text_config": _KOSMOS}, "kosmos-2.5": {"text_config": _KOSMOS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mllama": {"text_config": _MLLAMA}, "mllama_text_model": _MLLAMA,
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    "qwen4_exp": {"text_config": _QWEN4}, "qwen4_exp_text": _QWEN4,
    "reformer": {
        "is_decoder": True, "axial_pos_embds": False, "attn_layers": ("local", "lsh", "local", "lsh"),
        "attention_head_size": 8, "num_buckets": 4, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
        "feed_forward_size": 64, "hash_seed": 0,
    },
    "rwkv": {"rescale_every": 2},
    "roc_bert": {
        "pronunciation_embed_dim": 8, "pronunciation_vocab_size": 20, "shape_embed_dim": 8, "shape_vocab_size": 20,
    },
    **dict.fromkeys(
        [
            "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl",
            "cosmos3_edge", "hunyuan_vl",
        ],
        _VLM,
    ),
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0]}}},
    "cohere_compass": {
        "text_config": {
            "layer_types": _SLIDING, "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        },
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "glm5_next": {"text_config": {**_MHA, "index_topk": 16, "qk_rope_head_dim": 0}}, "mistral_large4": {"text_config": _MHA},
    "granite4_vision": {"deepstack_layer_map": [(-1, 0), (-2, 1)]},
    "hy_v4_vl": {"text_config": {**_MHA, **_MROPE}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}}, "inkling2_loop": {
        "vision_config": {"text_hidden_size": 32},
        "text_config": {
            "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_gate_rank": 4, "num_hidden_layers": 6,
        },
    },
    "ernie4_5_vl_moe": {"text_config": {**_MROPE, "moe_intermediate_size": [32, 32]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "apertus1p5": {"audio_config": {"codebook_dim": 32}},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "molmo2": {"vision_config": {"image_size": [16, 16]}, "adapter_config": {"vision_feature_layer": [1, 2]}},
    "xlm": {"emb_dim": 32},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "attention_head_dim": 16},
    "zamba2": {**_ZAMBA, "n_mamba_heads": 8, "mamba_d_state": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_config(model_type: str, **fields: Any) -> Any:
    """A tiny config of `model_type`; `fields` beat the tables."""
    return _shrunk(CONFIG_MAPPING[model_type], FIELDS.get(model_type, {}) | fields)


def _shrunk(config_class: type, fields: dict[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(config_class)}
    values = {name: value for name, value in SMALL.items() if name in names}
    for name, part in (config_class.sub_configs or {}).items():  # type: ignore[attr-defined]
        given = fields.get(name, {})
        if part is AutoConfig:
            model_type = given.get("model_type") or getattr(getattr(config_class(), name, None), "model_type", None)
            if model_type is None:
                continue
            given = FIELDS.get(model_type, {}) | {k: v for k, v in given.items() if k != "model_type"}
            part = CONFIG_MAPPING[model_type]
        values[name] = _shrunk(part, given)
    parts = set(config_class.sub_configs or {})  # type: ignore[attr-defined]
    return config_class(**values | {k: v for k, v in fields.items() if k not in parts})


def build(model_type: str, *, seed: int = 0, **fields: Any) -> nn.Module:
    """A tiny random model of `model_type` in eval mode, whose layers are all far from the identity."""
    config = small_config(model_type, **fields)
    if model_type in ("musicgen", "musicgen_melody"):  # their causal LM takes the config of the decoder alone
        config = config.decoder
    if hasattr(config, "is_decoder") and "is_decoder" not in fields:
        config.is_decoder = True
    torch.manual_seed(seed)
    return livened(_made(model_type, config)).eval()


def _made(model_type: str, config: Any) -> nn.Module:
    if model_type in ("musicgen", "musicgen_melody"):
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config)
    if model_type == "gemma3n":  # its vision tower is a timm model, which a text model needs no timm for
        return _without_timm(config)
    auto = AutoModelForCausalLM if model_type in CAUSAL_LMS else AutoModelForImageTextToText
    return auto.from_config(config)


def _without_timm(config: Any) -> nn.Module:
    made = AutoModel.from_config

    def made_unless_timm(part: Any, **given: Any) -> nn.Module:
        return nn.Identity() if part is config.vision_config else made(part, **given)

    with mock.patch.object(AutoModel, "from_config", made_unless_timm):
        return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def livened(model: nn.Module) -> nn.Module:
    """Random weights large enough to matter, in vectors that start as ones or zeros too."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.15)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def token_ids(B: int, S: int, *, seed: int = 1) -> torch.Tensor:
    """(B, S) ids from 8..79, none of which any tiny config gives a role to."""
    return torch.randint(8, 80, (B, S), generator=torch.Generator().manual_seed(seed))
