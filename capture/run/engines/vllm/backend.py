"""The backend of a model that vLLM runs; its structure comes from a skeleton without weights in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .....hooks import find_taps
from .....models.config import text_config
from .....models.decoder import Decoder
from .....models.errors import UsageError
from .....models.loaded_model import LoadedModel
from .....models.loading import describe_model
from ...attached_model import AttachedModel
from ...backend import EngineKind
from ...distributed.ranks import Ranks
from ...pacing.pace import Pacer, SteadyPace
from ...settings import CaptureSettings
from .asked_states import AskedStates
from .engine import VllmEngine
from .library import opened_for_states
from .options import engine_identity
from .refusals import require_vllm_can


@dataclass(frozen=True)
class VllmBackend:
    """A model as its config and the headers of its weights describe it, and how vLLM is to open it."""

    settings: CaptureSettings
    loaded: LoadedModel
    attached: AttachedModel

    @classmethod
    def of(cls, settings: CaptureSettings, ranks: Ranks) -> VllmBackend:  # noqa: ARG003 - vLLM starts its own processes
        """Find the layers of the model in its skeleton.

        Raises:
            UsageError: an adapter would be needed, which vLLM does not have.
            CheckpointError, ModelLoadError, DecoderNotFoundError, LayerIdError, LayerIdTypeError, DraftConfigError.
        """
        loaded = describe_model(settings.model)
        decoder, taps = find_taps(loaded.model, settings.layers, settings.final)
        if decoder.adapter_name is not None:
            raise UsageError(
                f"the residual stream of {type(loaded.model).__name__} is read through the adapter {decoder.adapter_name}, which "
                "vLLM does not have; take --engine hf."
            )
        H = getattr(text_config(loaded.model.config), "hidden_size", None)
        if not isinstance(H, int):
            raise UsageError(f"the config of {settings.model.name} states no hidden_size; take --engine hf.")
        dtype: torch.dtype = getattr(torch, loaded.weights_dtype)
        return cls(settings, loaded, AttachedModel(decoder, taps, H, H, dtype, _norm_path(decoder)))

    @property
    def identity(self) -> Mapping[str, Any]:
        return _identity(self.settings)

    @property
    def takes_images(self) -> bool:
        return False

    def pacer(self, engine: VllmEngine, tokens: int, note: Callable[[str], None]) -> Pacer:  # noqa: ARG002
        """Return batches of one size: vLLM orders and packs the prompts of each by itself."""
        return SteadyPace(engine, self.settings.batch_tokens or VllmEngine.BATCH_TOKENS)

    @contextmanager
    def engine(self, store_dtype: torch.dtype, longest: int) -> Iterator[VllmEngine]:
        """vLLM with the model's weights, for samples of up to `longest` tokens, inside the block alone.

        Raises:
            RunError: vLLM cannot open the model, or does not give the states that it was asked for.
        """
        attached, settings = self.attached, self.settings
        asked = AskedStates(attached.taps, attached.decoder.n)
        tap_names = settings.tap_names(attached.taps)
        rows = max(settings.batch_tokens or VllmEngine.BATCH_TOKENS, longest)
        with opened_for_states(self.loaded.source, settings, attached, asked, rows, longest) as (llm, arena):
            engine = VllmEngine(llm, arena, asked, store_dtype, tap_names)
            engine.prove(attached.decoder.vocab_rows or 2)
            yield engine


def _norm_path(decoder: Decoder) -> str | None:
    """Return the path of the norm next to the layers, if any; the files name it, vLLM finds its own."""
    beside = decoder.layers_path.rpartition(".")[0]
    found = [
        path
        for path, module in decoder.modules_outside_layers()
        if "norm" in type(module).__name__.lower() and path.rpartition(".")[0] == beside
    ]
    return found[0] if len(found) == 1 else None


def _identity(settings: CaptureSettings) -> Mapping[str, Any]:
    options = engine_identity(settings.engine_options)
    return {"mode": "vllm", "attn_implementation": "vllm", "engine_options": options}


KIND = EngineKind(require_vllm_can, _identity, VllmBackend.of)
