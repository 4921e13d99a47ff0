"""A model with taps on it, run step by step on a key-value cache."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ...hooks import Collector, Final, FinalNorm, GatheredRows, TapError, Taps, probe
from ...models.call import CACHE_NAMES, input_device, without_cache
from ...models.config import text_config
from ...models.decoder import Decoder, find_decoder
from ...models.layer_ids import Convention, to_boundaries
from ...models.pipeline import pipeline_group_of
from ...models.wrappers import unwrapped
from ..mixin import require_single_stage
from .held_positions import HeldPositions


@dataclass(frozen=True)
class StepOutput:
    """What one step gave.

    logits: (B, n, V) after the last n of its tokens.
    columns: `aux_hidden_states` (B * S, K, H) and, as asked, `pre_norm` and `post_norm` (B * S, H).
    """

    logits: Tensor
    columns: dict[str, Tensor]


class CachedModel:
    """A causal language model, its taps, and how it takes a cache.

    The model is the caller's own: only `attached` touches it, and puts everything back.
    """

    def __init__(
        self, decoder: Decoder, taps: Taps, norm: FinalNorm | None, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.decoder, self.taps, self.hidden_size, self.dtype = decoder, taps, hidden_size, dtype
        self.norm_path = norm.path if norm else None
        self.model = decoder.model
        self.device = input_device(self.model)
        self._collector = Collector(decoder, taps, norm.module if norm else None)
        parameters = inspect.signature(type(unwrapped(self.model)).forward).parameters
        self._takes = {name for name in parameters if name in ("position_ids", "logits_to_keep")}
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])

    @property
    def name(self) -> str:
        """What the model is called in messages."""
        return type(self.model).__name__

    @property
    def max_positions(self) -> int | None:
        """How many positions the model has learnt or allows, where its config says."""
        limit = getattr(text_config(getattr(self.model, "config", None)), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def new_cache(self, *, recording: bool = False) -> Cache:
        """An empty cache; a recording one keeps what a crop needs to bring back."""
        cache = DynamicCache(config=getattr(self.model, "config", None))
        if recording:
            cache.activate_past_recording()
        return cache

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are on the model, and it is in evaluation mode, inside the block alone."""
        self._collector.attach()
        try:
            with _evaluating(self.model):
                yield
        finally:
            self._collector.detach()

    @torch.no_grad()
    def step(self, input_ids: Tensor, held: HeldPositions, logits: int) -> StepOutput:
        """Run (B, S) tokens behind what the cache holds, and put them into it.

        logits: after how many of the last tokens logits are wanted.

        Raises:
            TapError: a tap did not fire exactly once for all B * S tokens.
        """
        arguments: dict[str, Any] = {self._cache_name: held.cache, "use_cache": True}
        if held.is_ragged:
            S = input_ids.shape[1]
            arguments["attention_mask"] = held.attention_mask(S, self.device)
            if "position_ids" in self._takes:
                arguments["position_ids"] = held.position_ids(S, self.device)
        return self._run(input_ids, arguments, logits)

    @torch.no_grad()
    def plain(self, input_ids: Tensor) -> StepOutput:
        """Run (B, S) tokens from the start, without a cache; logits after all of them."""
        return self._run(input_ids, without_cache(self.model), input_ids.shape[1])

    def _run(self, input_ids: Tensor, arguments: dict[str, Any], logits: int) -> StepOutput:
        B, S = input_ids.shape
        if "logits_to_keep" in self._takes and logits < S:
            # An index and not a number: for a number some models drop the other tokens before their last layers.
            arguments["logits_to_keep"] = torch.arange(S - logits, S, device=self.device)
        slots = GatheredRows(len(self.taps.boundaries), None, B * S)
        with self._collector.armed(slots, B, S):
            output = self.model(input_ids=input_ids.to(self.device), **arguments)
        return StepOutput(output.logits[:, -logits:], self._columns(slots))

    def _columns(self, slots: GatheredRows) -> dict[str, Tensor]:
        columns: dict[str, Tensor] = {}
        if slots.aux_hidden_states is not None:
            columns["aux_hidden_states"] = slots.aux_hidden_states
        names = [
            name for name, asked in (("pre_norm", self.taps.pre_norm), ("post_norm", self.taps.post_norm)) if asked
        ]
        K = len(self.taps.boundaries)
        return columns | {name: slots.norms[K + place] for place, name in enumerate(names)}


def cached_model(model: nn.Module, layer_ids: Sequence[int], convention: Convention, final: Final) -> CachedModel:
    """Find the layers of `model`, see that the taps are true, and make ready to run it step by step.

    layer_ids: none of them leaves hidden states alone; logits are there all the same.

    Raises:
        PipelineCaptureError, DecoderNotFoundError, LayerIdError, LayerIdTypeError, TapError: as in an offline run.
    """
    require_single_stage(getattr(model, "pp_group", None) or pipeline_group_of(model), "DSPARK")
    decoder = find_decoder(model)
    taps = Taps(() if takes_nothing(layer_ids) else to_boundaries(layer_ids, decoder.n, convention), final)
    with _evaluating(model):
        truth = probe(decoder)
    truth.require(decoder, taps.boundaries)
    norm = truth.require_norm(decoder) if taps.final != "none" else truth.norm
    if truth.hidden_size is None or truth.dtype is None:
        raise TapError(f"no decoder layer of {type(model).__name__} gave a hidden state when it was tried.")
    return CachedModel(decoder, taps, norm, truth.hidden_size, truth.dtype)


def takes_nothing(layer_ids: Sequence[int] | None) -> bool:
    """Whether the ids say that no hidden states are wanted; no ids given at all say nothing, and are refused."""
    return layer_ids is not None and len(layer_ids) == 0


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
