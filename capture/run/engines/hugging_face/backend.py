"""The Hugging Face model in this process as the backend of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .....models.loading import load_model
from ...backend import EngineKind
from ...distributed.ranks import Ranks
from ...engine import CompilingEngine
from ...pacing.budget import TokenBudget
from ...pacing.pace import OneByOne, Pace, Pacer
from ...pacing.speeds import Speeds, speed_key
from ...settings import CaptureSettings
from .engine import HuggingFaceEngine, attach, attached_engine, identity_of_mode
from .opened import OpenedModel
from .sample_cache import require_chunks_within
from .streamed import StreamedBackend


@dataclass(frozen=True)
class HuggingFaceBackend(OpenedModel):
    """A model whose weights are in memory."""

    takes_images: bool

    @classmethod
    def of(cls, settings: CaptureSettings, ranks: Ranks) -> HuggingFaceBackend:
        """Load the model on the accelerator of this rank and prove its taps; raises as `load_model` and `attach` do."""
        source = ranks.placed(settings.model) if settings.tp == 1 else settings.model
        loaded = load_model(source, settings.tp)
        return cls(settings, loaded, *attach(loaded.model, settings), takes_images=settings.tp == 1)

    def engine(self, store_dtype: torch.dtype, longest: int) -> AbstractContextManager[HuggingFaceEngine]:
        """Return the engine, for samples of any length; its hooks are on the model inside the block alone.

        Raises:
            UsageError: the model computes samples of up to `longest` tokens otherwise in chunks than whole.
        """
        if self.settings.prefill_chunk is not None:
            require_chunks_within(self.attached.limits, self.settings.prefill_chunk, longest)
        return attached_engine(self.attached, self.collector, store_dtype, self.settings)

    def pacer(self, engine: CompilingEngine, tokens: int, note: Callable[[str], None]) -> Pacer:
        """Return the pace of a run: one sample a forward if exact, else sizes tried out or taken from an earlier run."""
        settings = self.settings
        if settings.exact:
            return OneByOne(engine)
        fixed = settings.batch_tokens
        budget = TokenBudget.probing(engine.device) if fixed is None else TokenBudget.fixed(fixed)
        # One process alone would find that compiling fails, and go on without; so it is not tried in a group unasked.
        # Nor with chunks: a cache that grows would have layers compiled again and again.
        asked = settings.compile
        mode = "off" if asked == "auto" and (settings.tp > 1 or settings.prefill_chunk is not None) else asked
        key = self._speed_key(engine.made_with)
        speeds = Speeds.of_user()
        return Pace(engine, budget, mode, tokens, note, speeds.read(key), partial(speeds.write, key))

    def _speed_key(self, made_with: Mapping[str, Any]) -> str:
        settings, attached = self.settings, self.attached
        attention = settings.model.attn_implementation
        return speed_key(
            self.loaded.config_hash,
            attached.taps.names,
            attached.dtype,
            made_with,
            attention=attention,
            top_logits=settings.top_logits,
            cpu_fast_paths=settings.cpu_fast_paths,
        )


def _refuse_nothing(_settings: CaptureSettings) -> None:
    """Settings that exclude each other with this engine are refused by `CaptureSettings` itself."""


def backend_of(settings: CaptureSettings, ranks: Ranks) -> HuggingFaceBackend | StreamedBackend:
    """Open the model of `settings` in this process, whole or layer by layer."""
    return StreamedBackend.of(settings, ranks) if settings.stream_weights else HuggingFaceBackend.of(settings, ranks)


KIND = EngineKind(_refuse_nothing, identity_of_mode, backend_of)
