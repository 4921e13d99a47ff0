"""A model with taps on it, run step by step on a key-value cache."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ....hooks import Final, GatheredRows, TappedModel
from ....models.call import cache_argument, evaluating, input_device, new_cache, without_cache
from ....models.config import model_config, text_config
from ....models.layer_choice import LayerChoice
from ....models.modules import unwrapped
from ....models.versions import record_past
from ..kv_cache.held_positions import HeldPositions


@dataclass(frozen=True)
class StepOutput:
    """Output of one step.

    logits: (B, n, V) after the last n of its tokens.
    columns: `aux_hidden_states` (B * S, K, H) and, as asked, `pre_norm` and `post_norm` (B * S, H).
    """

    logits: Tensor
    columns: dict[str, Tensor]


class CachedModel:
    """A causal language model, its taps, and how it takes a cache.

    The model is the caller's own: only `attached` touches it, and puts everything back.
    """

    def __init__(self, tapped: TappedModel) -> None:
        self.tapped, self.model, self.taps = tapped, tapped.model, tapped.taps
        self.device = input_device(self.model)
        parameters = inspect.signature(type(unwrapped(self.model)).forward).parameters
        self._takes = {name for name in parameters if name in ("position_ids", "logits_to_keep")}
        self._cache_name = cache_argument(self.model)

    @property
    def name(self) -> str:
        """Return the model's name in messages."""
        return type(self.model).__name__

    @property
    def max_positions(self) -> int | None:
        """Return the number of positions that the model allows, or None if its config does not state one."""
        limit = getattr(text_config(model_config(self.model)), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def new_cache(self, *, recording: bool = False) -> Cache:
        """Return an empty cache; a recording one keeps what a crop needs to bring back."""
        cache = new_cache(self.model)
        if recording:
            record_past(cache)
        return cache

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks and set evaluation mode, inside the block only."""
        with self.tapped.attached(), evaluating(self.model):
            yield

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
        with self.tapped.collector.armed(slots, B, S):
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


def cached_model(
    model: nn.Module, layers: LayerChoice | None, final: Final = "none", *, adapter: str | None = None
) -> CachedModel:
    """Tap `model` and make ready to run it step by step.

    layers: the layers to tap; None takes no hidden states, and logits are there all the same.

    Raises:
        PipelineCaptureError, DecoderNotFoundError, AdapterError, LayerIdError, LayerIdTypeError, DraftConfigError, TapError: as
            `TappedModel.of`.
    """
    with evaluating(model):
        return CachedModel(TappedModel.of(model, layers, final, adapter=adapter))
