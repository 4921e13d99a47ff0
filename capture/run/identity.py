"""What a run's files say of how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...models.loading import LoadedModel
from ..data import TokenisationIdentity, source_identity
from ..identity import dtype_name, made_with, tapped_identity
from .hugging_face import AttachedModel
from .settings import CaptureSettings
from .vllm import engine_identity


def run_identity(
    settings: CaptureSettings, loaded: LoadedModel, attached: AttachedModel, tokenisation: TokenisationIdentity
) -> dict[str, Any]:
    """What a later run on the same folder must agree with, as JSON values."""
    return {
        **forward_identity(settings, loaded, attached),
        "tokenisation": tokenisation.as_dict(),
        "data": [source_identity(source) for source in settings.data],
        "limit": settings.text.limit,
        "shard_rows": settings.shard_rows,
        # Whether such a sample ends the run or only itself changes no sealed shard.
        "on_bad_values": "keep" if settings.on_bad_values == "keep" else "reject",
        **({"engine_options": engine_identity(settings.engine_options)} if settings.engine == "vllm" else {}),
    }


def forward_identity(settings: CaptureSettings, loaded: LoadedModel, attached: AttachedModel) -> dict[str, Any]:
    """That part of a run's identity which says how its rows are computed, from which model."""
    ids, convention = settings.layers.told(attached.taps.boundaries)
    return {
        **tapped_identity(attached, ids, convention, loaded),
        **({"attn_implementation": "vllm"} if settings.engine == "vllm" else {}),
        "store_dtype": settings.store_dtype or dtype_name(attached.dtype),
        "top_logits": settings.top_logits,
        "mode": _mode(settings),
    }


def shard_metadata(
    identity: dict[str, Any],
    sources: Sequence[str],
    mask_rules: dict[str, int],
    engine: Mapping[str, Any],
    compiled: str,
) -> dict[str, Any]:
    """What each shard says of itself: the identity, and what may differ between runs that agree.

    engine: what the engine says of itself: the device that it computes on, and its library.
    """
    return {
        **identity,
        "sources": list(sources),
        "mask_rules": mask_rules,
        "made_with": made_with(engine, compiled),
    }


def _mode(settings: CaptureSettings) -> str:
    if settings.engine == "vllm":
        return "vllm"
    return "exact" if settings.exact else "batched"
