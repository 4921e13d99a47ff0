#!/usr/bin/env python
"""Write a checkpoint of random weights that is as large as asked, one layer at a time, for trying what does not fit in memory.

    python scripts/random_checkpoint.py --gigabytes 40 --dest BIG

The model is a Qwen3-MoE (128 experts, 8 of them active) with the tokenizer of `--tokenizer`, in bfloat16, under the names in
which such checkpoints are published: one tensor for each expert. With the defaults it takes 3.2 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

BYTES = 2  # of a bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, required=True, help="folder to write")
    parser.add_argument("--gigabytes", type=float, default=40.0, help="least size of all weights")
    parser.add_argument(
        "--tokenizer", required=True, help="folder or hub id of the tokenizer to store beside the weights"
    )
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    config = moe_config(arguments.hidden_size, arguments.experts, len(tokenizer), layers=2)
    per_layer = layer_bytes(config)
    config.num_hidden_layers = max(2, -(-int(arguments.gigabytes * 1e9) // per_layer))
    config.layer_types = None
    arguments.dest.mkdir(parents=True)
    tokenizer.save_pretrained(arguments.dest)
    moe_config(arguments.hidden_size, arguments.experts, len(tokenizer), config.num_hidden_layers).save_pretrained(
        arguments.dest
    )
    total = write_weights(arguments.dest, config.num_hidden_layers, arguments, len(tokenizer))
    print(f"{config.num_hidden_layers} layers, {total / 1e9:.1f} GB in {arguments.dest}")


def moe_config(hidden: int, experts: int, vocabulary: int, layers: int) -> AutoConfig:
    return AutoConfig.for_model(
        "qwen3_moe", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=4, head_dim=64, num_experts=experts,
        num_experts_per_tok=min(8, experts), moe_intermediate_size=3 * hidden // 8, norm_topk_prob=True,
        max_position_embeddings=32768, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def published(config: AutoConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights of a model, under the names in which they are published."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}


def layer_bytes(config: AutoConfig) -> int:
    return BYTES * sum(
        torch.Size(s).numel() for name, s in published(config).items() if name.startswith("model.layers.1.")
    )


def write_weights(dest: Path, layers: int, arguments: argparse.Namespace, vocabulary: int) -> int:
    """One file for each layer and one for the rest; returns the bytes of all."""
    two = published(moe_config(arguments.hidden_size, arguments.experts, vocabulary, layers=2))
    noise, weight_map, total = Noise(arguments.seed), {}, 0
    for part, shapes in parts(two, layers):
        name = f"model-{part}.safetensors"
        tensors = {key: noise.weight(shape) for key, shape in shapes.items()}
        save_file(tensors, dest / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() * BYTES for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (dest / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def parts(two: dict[str, tuple[int, ...]], layers: int) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Names and shapes of each file, from those of a model of two layers."""
    yield "outside", {name: shape for name, shape in two.items() if not name.startswith("model.layers.")}
    layer = {name: shape for name, shape in two.items() if name.startswith("model.layers.1.")}
    for i in range(layers):
        yield f"layer-{i:03}", {name.replace("layers.1.", f"layers.{i}.", 1): shape for name, shape in layer.items()}


class Noise:
    """Normal values from one buffer, from a new place in it for each weight: drawing 20 billion of them would take long."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._values = torch.randn(1 << 25, generator=self._random).to(torch.bfloat16)

    def weight(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A norm's weight is near one; a matrix keeps the length of what it is given."""
        count = torch.Size(shape).numel()
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        weight, at = torch.empty(count, dtype=torch.bfloat16), 0
        while at < count:
            start = int(torch.randint(len(self._values) // 2, (1,), generator=self._random))
            piece = self._values[start : start + count - at]
            torch.mul(piece, shape[-1] ** -0.5, out=weight[at : at + len(piece)])
            at += len(piece)
        return weight.reshape(shape)


if __name__ == "__main__":
    main()
