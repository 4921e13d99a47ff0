"""The identity of a run: what a later run on its folder must agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...hooks import Taps
from ..data import TokenisationIdentity, source_identity
from ..identity import dtype_name, made_with, tapped_identity
from ..store import Manifest
from ..store.folder import MANIFEST_FILE
from .backend import Backend
from .settings import CaptureSettings


def run_identity(backend: Backend[Any], tokenisation: TokenisationIdentity) -> dict[str, Any]:
    """Return what a later run on the same folder must agree with, as JSON values."""
    settings = backend.settings
    return {
        **forward_identity(backend),
        **settings_identity(settings),
        "tokenisation": tokenisation.as_dict(),
        "data": [source_identity(source) for source in settings.data],
    }


def settings_identity(settings: CaptureSettings) -> dict[str, Any]:
    """Return that part of a run's identity which its settings say by themselves."""
    return {
        "limit": settings.text.limit,
        "shard_rows": settings.shard_rows,
        # Whether such a sample ends the run or only itself changes no sealed shard.
        "on_bad_values": "keep" if settings.on_bad_values == "keep" else "reject",
        "top_logits": settings.top_logits,
        "top_logits_p": settings.top_logits_p,
        "generated": None if settings.answers is None else _generated(settings.answers),
        **({} if settings.store_dtype is None else {"store_dtype": settings.store_dtype}),
    }


def _generated(answers: Path) -> dict[str, Any]:
    """Return how the answers of a regeneration were written, as its manifest says; the rest is the capture's own identity."""
    manifest = Manifest.read(answers / MANIFEST_FILE)
    names = ("engine", "engine_options", "turns", "drop_truncated", "sampling", "steps")
    told = {name: manifest.identity[name] for name in names if name in manifest.identity}
    return told | {"seed": manifest.plan["seed"], "end_tokens": manifest.plan["end_tokens"]}


def tap_choice(settings: CaptureSettings, taps: Taps) -> dict[str, Any]:
    """Return that part of a run's identity which says what is taken, in the words of the ids that were asked for."""
    ids, convention = settings.layers.as_ids(taps.boundaries)
    return {
        "convention": convention,
        "layer_ids": list(ids),
        "boundaries": list(taps.boundaries),
        "final": taps.final,
    }


def forward_identity(backend: Backend[Any]) -> dict[str, Any]:
    """Return that part of a run's identity which says how its rows are computed, from which model."""
    settings, attached = backend.settings, backend.attached
    ids, convention = settings.layers.as_ids(attached.taps.boundaries)
    return {
        **tapped_identity(attached, ids, convention, backend.loaded),
        "store_dtype": settings.store_dtype or dtype_name(attached.dtype),
        "top_logits": settings.top_logits,
        "top_logits_p": settings.top_logits_p,
        **backend.identity,
    }


def shard_metadata(
    identity: dict[str, Any],
    sources: Sequence[str],
    mask_rules: Mapping[str, int],
    engine: Mapping[str, Any],
    compiled: str,
) -> dict[str, Any]:
    """Return the metadata of every shard: the identity, and what may differ between runs that agree.

    engine: what the engine says of itself: the device that it computes on, and its library.
    """
    return {
        **identity,
        "sources": list(sources),
        "mask_rules": dict(mask_rules),
        "made_with": made_with(engine, compiled),
    }
