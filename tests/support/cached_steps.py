"""Tiny models of every kind of cache, and steps through them."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from support.architectures import build

FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "gpt_oss": {},
    "gemma4_text": {},
    "qwen3_next": {},
    "kimi_linear": {},
    "mamba2": {},
    "lfm2_moe": {},
    "falcon_h1": {},
    "inkling_text": {},
    "deepseek_v32": {"index_topk": 64},
    "qwen4_exp_text": {},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "deepseek_v4": {"index_topk": 64},
}
"""Model type to what its tiny config needs to have the layers in question, and a cached step equal to a plain forward."""

LAYERS = {
    "llama": {"DynamicLayer"},
    "gemma2": {"DynamicLayer", "DynamicSlidingWindowLayer"},
    "gpt_oss": {"DynamicLayer", "DynamicSlidingWindowLayer"},
    "gemma4_text": {"DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer"},
    "qwen3_next": {"DynamicLayer", "LinearAttentionLayer"},
    "kimi_linear": {"DynamicLayer", "LinearAttentionLayer"},
    "mamba2": {"LinearAttentionLayer"},
    "lfm2_moe": {"DynamicLayer", "LinearAttentionLayer"},
    "falcon_h1": {"LinearAttentionAndFullAttentionLayer"},
    "inkling_text": {"LinearAttentionAndSlidingWindowAttentionLayer"},
    "deepseek_v32": {"DynamicIndexedLayer"},
    "qwen4_exp_text": {"DynamicIndexedLayer", "LinearAttentionLayer"},
    "minimax_m3_vl_text": {"DynamicLayer", "MiniMaxM3VLSparseCacheLayer"},
    "deepseek_v4": {"DeepseekV4CSACache", "DeepseekV4HCACache"},
}


@functools.cache
def model_of(name: str) -> Any:
    return build(name, **FIELDS[name])


def empty_cache(name: str, recording: bool = False) -> Cache:
    cache = DynamicCache(config=model_of(name).config)
    if recording:
        cache.activate_past_recording()
    return cache


@torch.no_grad()
def step(name: str, input_ids: Tensor, cache: Cache) -> Tensor:
    """(B, S, V) logits of a step that reads and extends `cache`."""
    model = model_of(name)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=input_ids, use_cache=True, **{keyword: cache}).logits


@torch.no_grad()
def plain(name: str, input_ids: Tensor) -> Tensor:
    """(B, V) logits after the last of (B, S) ids, each row alone in a forward without a cache."""
    rows = [model_of(name)(input_ids=row[None], use_cache=False).logits[0, -1] for row in input_ids]
    return torch.stack(rows)
