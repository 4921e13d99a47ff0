#!/usr/bin/env python3
"""Makes a model folder from a config and random weights, without a network: what speed and memory need, and no more.

    python scripts/make_random_model.py llama FOLDER [--size full|tiny] [--device D] [--dtype bfloat16]

Full sizes: `llama` has 1.1 billion parameters, `moe` (Qwen3-MoE) 6.7 billion, of which 0.75 billion are active in a token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 8192}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "full": {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32_768,
        },
        "tiny": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 512,
        },
    },
    "moe": {
        "full": {
            "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 768, "num_hidden_layers": 21,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32_768, "num_experts": 64,
            "num_experts_per_tok": 4,
        },
        "tiny": {
            "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    },
}  # fmt: skip
TYPES = {"llama": "llama", "moe": "qwen3_moe"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--device", default="cpu", help="where the weights are made")
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.for_model(TYPES[asked.kind], **COMMON, **SIZES[asked.kind][asked.size])
    with torch.device(asked.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, asked.dtype))
    model.save_pretrained(asked.folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{asked.folder}: {type(model).__name__}, {parameters:,} parameters in {asked.dtype}")


if __name__ == "__main__":
    main()
