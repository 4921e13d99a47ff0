"""The tapped model of a run, as its files describe it, whichever engine runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...hooks import LogitsHead, Taps, find_taps_without_weights
from ...models.config import text_config
from ...models.decoder import Decoder
from ...models.length_limits import NO_LIMITS, LengthLimits
from ...models.loading import load_config
from ..store import Column, capture_columns, generation_columns
from .settings import CaptureSettings


@dataclass(frozen=True)
class AttachedModel:
    """A model with its taps, and what its shards record of both.

    Attributes:
        limits: lengths that no batch may lie on both sides of: the model computes rows by the longest sample of their batch.
    """

    decoder: Decoder
    taps: Taps
    hidden_size: int
    norm_size: int
    dtype: torch.dtype
    norm_path: str | None
    logits_head: LogitsHead | None = None
    top_logits: int = 0
    top_logits_p: float = 1.0
    limits: LengthLimits = NO_LIMITS

    def columns(self, store_dtype: torch.dtype, *, is_text: bool = False) -> tuple[Column, ...]:
        """Return the columns of a shard of these taps; `is_text` in a run with images."""
        taps = self.taps
        rows = capture_columns(
            len(taps.boundaries),
            self.hidden_size,
            store_dtype,
            norm_size=self.norm_size,
            pre_norm=taps.pre_norm,
            post_norm=taps.post_norm,
            is_text=is_text,
        )
        top = [c for c in generation_columns(topk=self.top_logits) if c.name.startswith("topk_")]
        return (*rows, *top)


def described(settings: CaptureSettings) -> AttachedModel | None:
    """Find the taps of `settings` in the model's skeleton on the meta device; no hook and no weight is involved.

    Width and dtype are those that the config states. None where the model cannot be built without its weights.

    Raises:
        ModelLoadError: there is no such model, or it needs remote code that was not allowed.
        PipelineCaptureError, DecoderNotFoundError, AdapterError, LayerIdError, LayerIdTypeError, DraftConfigError: as
            `TappedModel.of`.
    """
    config = load_config(settings.model)
    found = find_taps_without_weights(settings.model, settings.layers, settings.final, adapter=settings.adapter)
    if found is None:
        return None
    decoder, taps = found
    H = getattr(text_config(config), "hidden_size", None)
    if not isinstance(H, int):
        return None
    stated = settings.model.dtype if settings.model.dtype != "auto" else getattr(config, "dtype", None)
    dtype = getattr(torch, stated) if isinstance(stated, str) else stated or torch.float32
    return AttachedModel(decoder, taps, H, H, dtype, None, top_logits=settings.top_logits)
