"""Forms of a state that are no (B, S, H) tensor, told apart by shape, so that a refusal can say which adapters fit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..models.adapter_names import how_to_name
from ..models.decoder import Decoder
from .residual import describe


def form_fault(decoder: Decoder, state: Tensor, where: str) -> str | None:
    """Why `state`, read plainly, is not one residual stream of the hidden width; None where nothing speaks against it."""
    if decoder.adapter is not None or not decoder.widths:
        return None
    H = max(decoder.widths)
    if state.ndim == 4 and state.shape[-1] in decoder.widths:
        return (
            f"{where} handles {describe(state)}: several residual streams of width {state.shape[-1]}. "
            f"{how_to_name('hyper_connections.mean', 'hyper_connections.streams', 'altup.streams')}"
        )
    if state.ndim == 3 and state.shape[-1] > H and state.shape[-1] % H == 0:
        return (
            f"{where} handles {describe(state)}: {state.shape[-1] // H} times as wide as the embeddings, so several residual "
            f"streams side by side. {how_to_name('hyper_connections.mean', 'hyper_connections.streams')}"
        )
    return None


def blocks_beside(
    decoder: Decoder, state: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
) -> str | None:
    """Why the state that enters a layer is only a part of the stream: completed blocks (B, S, K, H) come along with it."""
    if decoder.adapter is not None:
        return None
    B, S, H = state.shape if state.ndim == 3 else (0, 0, 0)
    blocks = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim == 4 and v.is_floating_point())
    beside = next((v for v in blocks if v.shape[:2] == (B, S) and v.shape[-1] == H), None)
    if beside is None:
        return None
    return (
        f"{where} takes in {describe(beside)} beside its state {tuple(state.shape)}: completed blocks of the residual stream, "
        f"of which the state is only the running part. {how_to_name('attention_residuals.prefix')}"
    )
