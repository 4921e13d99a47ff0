"""The Kimi family: which generation a model is of, and how its residual stream is read.

Kimi Linear, K2 and K2.5 hand one state from layer to layer, whatever else their layers return (the code that came with K2's
checkpoints returned tuples); they are read plainly. Kimi K3 has attention residuals: a layer takes and returns the running
sum of its block beside the completed blocks, and each consumer mixes them by a learnt attention. Drafters exist for either
reading, so it has to be named. Inkling 2 keeps completed blocks in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .adapters import Adapter, Site, StreamError
from .config import text_config
from .modules import unwrapped


class AttentionResidualPrefix(Adapter):
    """The running sum of the block that a layer belongs to; it starts anew with each block."""

    name = "attention_residuals.prefix"
    about = "the running sum of the layer's block of layers (vLLM's default, EAGLE-3.1, Automodel)"

    @classmethod
    def suits(cls, layers: Sequence[nn.Module]) -> bool:
        inside = (type(part).__name__.lower() for layer in layers for part in unwrapped(layer).children())
        return AttentionResidualMixture.suits(layers) or any("attentionresidual" in name for name in inside)


class AttentionResidualMixture(Adapter):
    """What the next consumer mixes from the completed blocks and the running sum, read where it enters that consumer's norm.

    The consumer of boundary k < n is layer k, which mixes by its own residual projection; of boundary n it is the model,
    which mixes by its output projection. Reading what the model computed needs no second computation here, and stays right
    where weights are sharded or offloaded.
    """

    name = "attention_residuals.mixture"
    about = "the mixture of completed blocks and running sum that enters the next layer's norm (SGLang's DSpark)"

    @classmethod
    def suits(cls, layers: Sequence[nn.Module]) -> bool:
        return all(
            hasattr(unwrapped(layer), "self_attention_res_proj") and hasattr(unwrapped(layer), "input_layernorm")
            for layer in layers
        )

    def site(self, boundary: int) -> Site:
        n = len(self.layers)
        if boundary == n:
            norm = getattr(self.owner, "norm", None)
            if norm is None:
                raise StreamError(
                    f"{self.name}: {type(self.owner).__name__} has no norm that takes its output mixture."
                )
            return Site(norm, f"{self.layers_path.rpartition('.')[0]}.norm", True, n - 1)
        norm = unwrapped(self.layers[boundary]).get_submodule("input_layernorm")
        return Site(norm, f"{self.layers_path}.{boundary}.input_layernorm", True, boundary)


@dataclass(frozen=True)
class KimiGeneration:
    """One generation of the family.

    Attributes:
        name: such as ``Kimi K2.5``.
        adapters: the readings to choose from; empty where the plain one is right.
    """

    name: str
    adapters: tuple[str, ...] = ()


KIMI_LINEAR = KimiGeneration("Kimi Linear")
KIMI_K2 = KimiGeneration("Kimi K2")
KIMI_K25 = KimiGeneration("Kimi K2.5")
KIMI_K3 = KimiGeneration("Kimi K3", (AttentionResidualPrefix.name, AttentionResidualMixture.name))

# K2's own code calls the text model deepseek_v3 and K2.5's config kimi_k2; K3's text model is published as a kimi_linear.
_BY_MODEL_TYPE = {"kimi_linear": KIMI_LINEAR, "kimi_k2": KIMI_K2, "kimi_k25": KIMI_K25, "kimi_k3": KIMI_K3}


def kimi_generation(config: Any, layers: Sequence[nn.Module]) -> KimiGeneration | None:
    """Return the generation of a model of the Kimi family, by its config and layers; None for other models."""
    generation = _BY_MODEL_TYPE.get(getattr(config, "published_as", getattr(config, "model_type", "")))
    generation = generation or _BY_MODEL_TYPE.get(getattr(text_config(config), "model_type", ""))
    if generation is not None and AttentionResidualMixture.suits(layers):
        return KIMI_K3
    return generation
