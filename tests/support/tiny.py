"""Tiny random models, one per family, built from transformers' own config classes. H = 32, n = 4 unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB = 96


# The transformers that first has a type, of those that the lowest version taken lacks.
SINCE = {"kimi_k25": "5.13", "kimi_linear": "5.17", "muse_glimmer_assistant": "5.15"}


def require_type(model_type: str) -> None:
    """Skip the test on a transformers that is older than the model type; a newer one without it fails the test."""
    if model_type in SINCE:
        require_transformers(SINCE[model_type], model_type)


def require_transformers(since: str, what: str) -> None:
    """Skip the test on a transformers before `since`, the first that has `what`."""
    if Version(version("transformers")) < Version(since):
        pytest.skip(f"transformers has {what} since {since}; found {version('transformers')}")


def _config(model_type: str, **fields: object) -> object:
    require_type(model_type)
    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **(common | fields))


def llama_config(**fields: object) -> object:
    return _config("llama", **fields)


def _gpt2() -> object:
    return AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    )


_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _deepseek_v3(**fields: object) -> dict[str, object]:
    return {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, **_MLA, **_MOE, **fields,
    }  # fmt: skip


def _kimi_linear() -> object:
    layers = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    return _config(
        "kimi_linear", layer_types=layers, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
        num_key_value_heads=4, linear_num_heads=4, linear_head_dim=8, linear_conv_kernel_dim=4, head_dim=8, **_MLA, **_MOE,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], object]] = {
    "llama": llama_config,
    "qwen3": lambda: _config("qwen3", head_dim=8),
    "gpt2": _gpt2,
    "gemma2": lambda: _config("gemma2", head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "gpt_oss": lambda: _config("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "deepseek_v3": lambda: _config("deepseek_v3", **_deepseek_v3()),
    "kimi_linear": _kimi_linear,
}


def build(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB,
    pad_token_id: int | None = 0,
) -> nn.Module:
    """A model of `family` with weights large enough that no layer is close to the identity."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.vocab_size = vocab_size
    config.pad_token_id = pad_token_id
    return _livened(AutoModelForCausalLM.from_config(config, dtype=dtype))


def build_type(model_type: str, *, seed: int = 0, **fields: object) -> nn.Module:
    """A model of a family that is not among `CONFIGS`."""
    torch.manual_seed(seed)
    return _livened(AutoModelForCausalLM.from_config(_config(model_type, **fields)))


def build_llama(*, seed: int = 0, **fields: object) -> nn.Module:
    torch.manual_seed(seed)
    return _livened(AutoModelForCausalLM.from_config(llama_config(**fields)))


def build_kimi_k25(*, seed: int = 0, vocab_size: int = VOCAB, pad_token_id: int | None = 0) -> nn.Module:
    """An image-text model whose text decoder is a DeepSeek-V3 of 4 layers and whose vision tower has 3.

    The last id stands for an image.
    """
    torch.manual_seed(seed)
    text = _config("deepseek_v3", **_deepseek_v3(vocab_size=vocab_size, pad_token_id=pad_token_id)).to_dict()
    vision = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 4,
        "merge_kernel_size": [2, 2], "init_pos_emb_height": 8, "init_pos_emb_width": 8,
    }  # fmt: skip
    require_type("kimi_k25")
    config = AutoConfig.for_model(
        "kimi_k25", text_config=text, vision_config=vision, image_token_id=vocab_size - 1, pad_token_id=pad_token_id
    )
    return _livened(AutoModelForImageTextToText.from_config(config))


def _livened(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def token_ids(B: int, S: int, *, seed: int = 1) -> torch.Tensor:
    """(B, S) ids that are no special token."""
    return torch.randint(8, VOCAB, (B, S), generator=torch.Generator().manual_seed(seed))
