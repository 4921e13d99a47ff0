"""Causal self-attention on the CPU, a block of rows at a time, where that is faster than torch's kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .process_setting import ProcessSetting

# Rows of queries that are done together. The keys after them are left out, so fewer rows waste less, and more rows make larger
# matrix products. Samples of more than LONGEST tokens go faster by torch's kernel.
BLOCK, LONGEST = 64, 768


def blocks_are_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attention_in_blocks` is faster than torch's kernel, for samples of up to `LONGEST` tokens.

    It does in bfloat16 on CPUs with AVX-512, whether or not they have its instructions for bfloat16. On a CPU with AMX, and in
    float32 on all kinds, they were not compared. Whoever registered an attention of his own under the name ``sdpa`` keeps it.
    """
    cpu = torch.cpu
    measured = cpu._is_avx512_supported() and not cpu._is_amx_tile_supported()
    ours_to_replace = ALL_ATTENTION_FUNCTIONS["sdpa"] in (sdpa_attention_forward, _forward)
    return device.type == "cpu" and dtype is torch.bfloat16 and measured and ours_to_replace


def blocked_attention() -> AbstractContextManager[None]:
    """Compute what transformers calls SDPA by `attention_in_blocks`, inside the block, where it is plain causal self-attention.

    That is for every model of this process and holds until the last of several open blocks ends. Whatever is longer
    than `LONGEST`, has a mask, a bias, a cache or dropout, needs gradients, looks both ways or is on another device is left to
    torch's kernel. An attention that somebody registers as ``sdpa`` inside the block stays.
    """
    return _IN_BLOCKS.held()


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    apart = not torch.is_grad_enabled() and dropout == 0.0 and query.device.type == "cpu"
    if apart and causal and plain and query.shape[2] == key.shape[2] <= LONGEST:
        return attention_in_blocks(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return result


# One operation for the compiler, which would else unroll the loop for every length.
@torch.library.custom_op("hiddentap::attention_in_blocks", mutates_args=())
def attention_in_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Softmax(scaling * query key^T) value, row i of S over keys 0..i.

    query: (B, heads, S, D). key: (B, groups, S, D). value: (B, groups, S, E). heads is a multiple of groups, and neighboring
    heads share a group. Returns (B, S, heads, E), contiguous, in their dtype. All is computed in float32 and rounded once, at
    the end.
    """
    (B, heads, S, D), groups, E = query.shape, key.shape[1], value.shape[-1]
    N, shared = B * groups, heads // groups
    out = value.new_empty(B, S, groups, shared, E)
    query = (query.float() * scaling).reshape(N, shared, S, D)
    key, value = key.float().reshape(N, S, D).mT, value.float().reshape(N, S, E)
    later = torch.full((BLOCK, BLOCK), -torch.inf).triu(1)
    for first in range(0, S, BLOCK):
        end = min(first + BLOCK, S)
        rows = end - first
        scores = torch.bmm(query[:, :, first:end].reshape(N, shared * rows, D), key[:, :, :end])
        scores.view(N, shared, rows, end)[..., first:] += later[:rows, :rows]
        mixed = torch.bmm(scores.softmax(-1), value[:, :end])
        out[:, first:end] = mixed.view(B, groups, shared, rows, E).permute(0, 3, 1, 2, 4)
    return out.view(B, S, heads, E)


@attention_in_blocks.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG001
    B, heads, S, _ = query.shape
    return query.new_empty(B, S, heads, value.shape[-1])


def _replace() -> None:
    AttentionInterface.register("sdpa", _forward)


def _put_back() -> None:
    """Put transformers' own attention back, unless somebody registered another one meanwhile."""
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is _forward:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


_IN_BLOCKS = ProcessSetting(_replace, _put_back)
