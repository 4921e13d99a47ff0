"""What is known of a model that vLLM runs: its structure, from a skeleton without weights in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ....models.config import text_config
from ....models.decoder import Decoder, find_decoder
from ....models.errors import UsageError
from ....models.loading import LoadedModel, describe_model
from ..hugging_face import AttachedModel
from ..settings import CaptureSettings
from .asked_states import AskedStates
from .engine import VllmEngine
from .library import opened_library


@dataclass(frozen=True)
class VllmBackend:
    """A model as its config and the headers of its weights describe it, and how vLLM is to open it."""

    settings: CaptureSettings
    loaded: LoadedModel
    attached: AttachedModel

    @classmethod
    def of(cls, settings: CaptureSettings) -> VllmBackend:
        """Find the layers of the model in its skeleton.

        Raises:
            UsageError: an adapter would be needed, which vLLM does not have.
            CheckpointError, ModelLoadError, DecoderNotFoundError, LayerIdError, LayerIdTypeError, DraftConfigError.
        """
        loaded = describe_model(settings.model)
        decoder = find_decoder(loaded.model)
        if decoder.adapter_name is not None:
            raise UsageError(
                f"the residual stream of {type(loaded.model).__name__} is read through the adapter {decoder.adapter_name}, which "
                "vLLM does not have; take --engine hf."
            )
        taps = settings.taps(decoder.n)
        H = getattr(text_config(loaded.model.config), "hidden_size", None)
        if not isinstance(H, int):
            raise UsageError(f"the config of {settings.model.name} states no hidden_size; take --engine hf.")
        dtype: torch.dtype = getattr(torch, loaded.weights_dtype)
        return cls(settings, loaded, AttachedModel(decoder, taps, H, dtype, _norm_path(decoder)))

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
        with opened_library(self.loaded.source, settings, attached, asked, rows, longest) as (llm, arena):
            engine = VllmEngine(llm, arena, asked, store_dtype, tap_names)
            engine.prove(attached.decoder.vocab_rows or 2)
            yield engine


def _norm_path(decoder: Decoder) -> str | None:
    """The norm that stands beside the layers, where there is one; the files name it, vLLM finds its own."""
    beside = decoder.layers_path.rpartition(".")[0]
    found = [
        path
        for path, module in decoder.modules_outside_layers()
        if "norm" in type(module).__name__.lower() and path.rpartition(".")[0] == beside
    ]
    return found[0] if len(found) == 1 else None
