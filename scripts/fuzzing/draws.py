"""What one draw consists of, and how it follows from a seed and a number."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from support import architectures

from .families import FAMILIES, LONGEST, Family, limits_of
from .oracle import Unrunnable
from .ways import WAYS, Way
from .wrappers import WRAPPERS

Mode = Literal["eval", "train", "dropout"]
LAYERS = 4


@dataclass(frozen=True)
class Draw:
    """One model and one way to run it.

    Attributes:
        fields: config fields of the model, on top of the tiny ones of its family.
        attention: ``eager`` or ``sdpa``.
        mode: ``train`` has no dropout; ``dropout`` has, and compares one seeded sample.
        lengths: tokens of each of the B samples.
        cut: where a run on a cache is cut, as a share of the positions at which it may be.
    """

    seed: int
    number: int
    family: Family
    fields: Mapping[str, Any]
    weights: int
    attention: str
    dtype: torch.dtype
    mode: Mode
    way: Way
    wrapper: str
    lengths: tuple[int, ...]
    layer_ids: tuple[int, ...]
    cut: float

    def __str__(self) -> str:
        rest = [self.way.name, self.wrapper, str(self.dtype).removeprefix("torch."), self.attention, self.mode]
        return f"{self.seed}:{self.number} {self.family.model_type} [{', '.join(rest)}] lengths {self.lengths}"

    def in_way(self, way: Way) -> Draw:
        """The same draw, run in another way."""
        return replace(self, way=way)

    def samples(self) -> tuple[Tensor, ...]:
        """The samples' ids, (L,) int64 each."""
        return tuple(
            architectures.token_ids(1, length, seed=self.weights + i)[0] for i, length in enumerate(self.lengths)
        )

    def model(self) -> nn.Module:
        """The model, made anew: some models remember what they were run on. Raises Unrunnable where that cannot be."""
        model = self.family.build(self.fields, self.weights)
        if self.dtype is not torch.float32:
            model = _loaded_in(self.dtype, model)
        if self.attention != "default":
            model.set_attn_implementation(self.attention)
        return model.train(self.mode != "eval")


def _loaded_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """`model` as loading makes it, which keeps some of its parts in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            return type(model).from_pretrained(folder, dtype=dtype)
        except Exception as failed:
            raise Unrunnable(f"{type(failed).__name__}: {failed}") from failed


def draw(seed: int, number: int) -> Draw:
    """The draw of this seed and number; the same on every machine."""
    rng = Random(f"{seed}:{number}")
    family = rng.choice(list(FAMILIES.values()))
    way = rng.choices(list(WAYS.values()), [way.weight for way in WAYS.values()])[0]
    fields = {"tie_word_embeddings": rng.random() < 0.3} | family.vary(rng)
    wrapper = _wrapper(rng, way) if rng.random() < 0.25 else "none"
    mode: Mode = rng.choices(["eval", "train", "dropout"], [16, 1, 3])[0] if way.entry in ("tap", "mixin") else "eval"
    if mode == "dropout" and not (way.exact and wrapper == "none"):
        mode = "train"
    if mode != "eval":
        fields |= dict.fromkeys(_dropouts(family.model_type), 0.2 if mode == "dropout" else 0.0)
    weights, compiled = rng.randrange(10**6), "compiled" in wrapper
    return Draw(
        seed=seed,
        number=number,
        family=family,
        fields=fields,
        weights=weights,
        attention=rng.choice(["default", "default", "eager"]),
        dtype=torch.bfloat16 if rng.random() < 0.15 else torch.float32,
        mode=mode,
        way=way,
        wrapper=wrapper,
        lengths=_lengths(rng, family, fields, way)[: 1 if mode == "dropout" or (way.alone and compiled) else None],
        layer_ids=tuple(sorted(rng.sample(range(LAYERS), rng.randint(1, 3)))),
        cut=rng.random(),
    )


def _wrapper(rng: Random, way: Way) -> str:
    able = [wrapper for wrapper in WRAPPERS.values() if way.takes(wrapper)]
    return rng.choices([wrapper.name for wrapper in able], [wrapper.weight for wrapper in able])[0]


def _dropouts(model_type: str) -> list[str]:
    """Return the config fields that make a model random in training: dropouts, and the noise of routers."""
    names = vars(CONFIG_MAPPING[model_type]()).keys()
    return [
        name for name in names
        if ("drop" in name or "jitter" in name) and name.split("_")[0] not in ("summary", "layerdrop", "classifier")
    ]  # fmt: skip


def _lengths(rng: Random, family: Family, fields: Mapping[str, Any], way: Way) -> tuple[int, ...]:
    """Lengths of 2 to 4 samples: short, mixed, around a length that the config names, or as many tokens as samples."""
    B = rng.randint(2, 4)
    if way.told == "nothing" and not way.alone:
        return (rng.choice([B, rng.randint(1, 40)]),) * B
    limits = limits_of(architectures.small_config(family.model_type, **fields))
    kind = rng.choice(["around", "around", "around", "mixed", "short", "square"])
    if kind == "square":
        return (B,) * B
    if kind == "short":
        return tuple(rng.randint(1, 6) for _ in range(B))
    if kind == "around" and limits:
        limit = rng.choice(limits)
        return tuple(min(max(limit + rng.randint(-4, 5), 1), LONGEST) for _ in range(B))
    return tuple(rng.randint(1, 40) for _ in range(B))
