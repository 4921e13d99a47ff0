"""Tiny models whose greedy output is not one token over and over, and plain answers to compare a generation with."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from support import architectures, tiny

FOUR = ["llama", "qwen3", "gpt_oss", "kimi_linear"]
LAYER_IDS = [0, 2, 3]
PROMPTS = [architectures.token_ids(1, length, seed=length).tolist()[0] for length in (7, 3, 12, 7, 1, 20)]


@functools.cache
def lively(family: str, scale: float = 1.5) -> Any:
    """A tiny model with weights scaled until its output varies."""
    model = tiny.build(family, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own generate gives."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


class PlainForward:
    """One plain forward over a whole sequence, its layer outputs noted by hooks of its own."""

    @torch.no_grad()
    def __init__(self, model: Any, ids: Sequence[int], layers_path: str = "model.layers") -> None:
        self.outputs: list[Tensor] = []
        handles = [
            layer.register_forward_hook(lambda _m, _a, out: self.outputs.append(_tensor(out)[0].clone()))
            for layer in model.get_submodule(layers_path)
        ]
        try:
            self.logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()

    def layers(self, layer_ids: Sequence[int]) -> Tensor:
        """(S, K, H)."""
        return torch.stack([self.outputs[layer] for layer in layer_ids], dim=1)


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def row_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row (the last dimension), relative to its norm."""
    assert found.shape == expected.shape
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.max())


def assert_rows_of_a_plain_forward(model: Any, result: Any, layer_ids: Sequence[int] = LAYER_IDS) -> None:
    """P + G - 1 rows, aligned as documented, equal to one plain forward over prompt and output."""
    P, G = len(result.prompt_ids), len(result.token_ids)
    assert G >= 1
    assert result.input_ids.tolist() == [*result.prompt_ids, *result.token_ids[:-1]]
    assert result.output_ids.tolist() == [-1] * (P - 1) + list(result.token_ids)
    assert result.rows["loss_mask"].tolist() == [0] * P + [1] * (G - 1)
    plain = PlainForward(model, result.input_ids.tolist())
    assert result.aux_hidden_states.shape[0] == P + G - 1
    assert row_error(result.aux_hidden_states, plain.layers(layer_ids)) < 1e-5


def hooks_of(model: Any) -> list[int]:
    """How many hooks each module has; transformers leaves some of its own after output_hidden_states."""
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


class CountedCalls:
    """Counts the forwards of a model and notes their shapes, inside a `with` block."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.shapes: list[tuple[int, int]] = []

    def __enter__(self) -> "CountedCalls":
        self._handle = self._model.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
        if cache is not None:
            self.shapes.append(tuple(ids.shape))


def require_lookup(family: str) -> None:
    """Skip where the family's cache drops positions, which transformers before 5.14 cannot bring back."""
    if family == "gpt_oss":
        tiny.require_transformers("5.14", "caches that bring dropped positions back")
