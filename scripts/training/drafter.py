"""The drafter that is trained: transformers' DFlash class at the target's width, its context channels brought to one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from .context import TargetHead

CONTEXT_WEIGHT = "encoder.fc.weight"


class Drafter:
    """A `MuseGlimmerAssistantModel` and the scale of its context channels.

    In training the context is divided by `scale`, so that all channels move at one learning rate. `save` folds the scale into
    the first projection: what is saved takes the target's states as they are, and runs in transformers unchanged.

    Attributes:
        scale: (K * H,) float32.
    """

    def __init__(self, model: Any, scale: Tensor) -> None:
        self.model = model
        self.scale = scale

    def context(self, rows: Tensor) -> Tensor:
        """(T, K * H) states of the target to what the model is trained on."""
        return rows / self.scale

    def served_state(self) -> dict[str, Tensor]:
        """The weights for states as they are."""
        state: dict[str, Tensor] = {name: value.detach() for name, value in self.model.state_dict().items()}
        return {**state, CONTEXT_WEIGHT: state[CONTEXT_WEIGHT] / self.scale}

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors."""
        self.model.save_pretrained(folder, state_dict=self.served_state())


def drafter_config(
    target: Any, target_layer_ids: list[int], *, layers: int, block_size: int, mask_token_id: int
) -> MuseGlimmerAssistantConfig:
    """The config of a drafter as wide as the target, with as many heads; `target` is its text config.

    Each head has keys and values of its own, whatever the target shares: all that a drafter of few layers learns of the context
    comes through its values, and those of a small target with shared ones are narrow (192 of 576 channels in SmolLM2).

    ``vocab_size`` and ``dflash_config`` are for serving engines: transformers reads neither, but vLLM and SGLang take the
    sizes of embeddings and lm_head from the first (its class has a default of its own), and mask token and layers from the
    second. Without them vLLM 0.32 fails, or serves the drafter on default layers.
    """
    heads = target.num_attention_heads
    return MuseGlimmerAssistantConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        max_position_embeddings=target.max_position_embeddings,
        layer_types=["full_attention"] * layers,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        vocab_size=target.vocab_size,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids},
    )


def new_drafter(config: MuseGlimmerAssistantConfig, head: TargetHead, scale: Tensor, seed: int) -> Drafter:
    """Random weights, and beside them what hands on the last captured layer.

    The last norm begins as the target's, so that states come out as large as its lm_head expects.
    """
    torch.manual_seed(seed)
    model = MuseGlimmerAssistantModel(config)
    hand_on_last_layer(model, scale)
    if head.norm is not None and "RMSNorm" in type(head.norm).__name__:
        start_like(model.norm, head.norm)
    return Drafter(model, scale)


@torch.no_grad()
def hand_on_last_layer(model: Any, scale: Tensor) -> None:
    """Let the first attention add the mean of the context's last captured layer, as it is, to what random weights make.

    Random layers alone leave the mask token's embedding almost as it came, from which a tied lm_head reads the mask token: the
    first steps go into forgetting that. After 400 steps at a learning rate of 3e-3 a SmolLM2 drafter was accepted 1.37 tokens a
    step with this start, 1.28 without.
    """
    attention, H = model.layers[0].self_attn, model.config.hidden_size
    last = scale[-H:] / scale[-H:].median()
    model.encoder.fc.weight[:, -H:].diagonal().add_(last)
    attention.v_proj.weight.diagonal().add_(1)
    attention.o_proj.weight.diagonal().add_(1)


@torch.no_grad()
def start_like(norm: nn.Module, target_norm: nn.Module) -> None:
    """Give an RMS norm the gains of another, found by what it makes of ones (some store their weight less one)."""
    weight = norm.get_parameter("weight")
    gains = next(target_norm.parameters())
    weight.copy_(target_norm(torch.ones_like(gains)))
