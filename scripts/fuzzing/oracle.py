"""Rows as a plain forward shows them: one unpadded sequence, hooks of this file's own, nothing of hiddentap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SEED = 7


class Unrunnable(Exception):  # noqa: N818 - an outcome and no fault
    """The model itself does not run so."""


class Irregular(Exception):  # noqa: N818 - an outcome and no fault
    """The layers do not give one (L, H) state each: there is nothing that a capture could rightly show."""


@torch.no_grad()
def plain_rows(model: nn.Module, path: str, layer_ids: Sequence[int], ids: Tensor, **kwargs: Any) -> Tensor:
    """(L, K, H): what leaves the layers under `path` in one forward of `ids` (L,) without a cache."""
    layers, states = model.get_submodule(path), {k: [] for k in layer_ids}
    handles = [layers[k].register_forward_hook(_noting(states[k])) for k in layer_ids]
    torch.manual_seed(SEED)
    try:
        model(ids[None], use_cache=False, **kwargs)
    except Exception as failed:
        raise Unrunnable(f"{type(failed).__name__}: {failed}") from failed
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([_one_state(states[k], len(ids), k) for k in layer_ids], 1)


def _noting(states: list[Any]) -> Callable[..., None]:
    return lambda _module, _args, output: states.append(_first_tensor(output))


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output.detach().clone()
    items = list(output.values()) if isinstance(output, dict) else list(output or ())
    return _first_tensor(items[0]) if items else None


def _one_state(states: list[Tensor | None], L: int, layer: int) -> Tensor:
    if len(states) != 1 or states[0] is None:
        raise Irregular(f"layer {layer} ran {len(states)} times")
    state = states[0]
    if state.ndim < 2 or state.numel() != L * state.shape[-1]:
        raise Irregular(f"layer {layer} gave {tuple(state.shape)} for {L} tokens")
    return state.reshape(L, state.shape[-1])
