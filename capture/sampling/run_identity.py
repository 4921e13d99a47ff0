"""Provenance in the shards of a generation, in the words of an offline run's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...hooks import TappedModel
from ...models.layer_choice import LayerChoice
from ...models.loaded_model import LoadedModel
from ..identity import dtype_name, tapped_identity
from .generation.end_marks import EndMarks
from .generation.loop import LoopSettings
from .sampler.params import SamplingParams


def generation_identity(
    tapped: TappedModel,
    layers: LayerChoice,
    params: Sequence[SamplingParams],
    settings: LoopSettings,
    end_marks: EndMarks,
    loaded: LoadedModel | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Model, taps, sampling and how steps were made, as JSON values.

    layers: what was asked for; the taps are told in its words.
    loaded: where the model came from, if it was loaded from somewhere known.
    more: what the caller knows of tokenizer and data.
    """
    ids, convention = layers.as_ids(tapped.taps.boundaries)
    return {
        **tapped_identity(tapped, ids, convention, loaded),
        "store_dtype": dtype_name(tapped.dtype),
        "mode": "generation",
        "sampling": sampling_identity(params),
        "steps": asdict(settings),
        "end_tokens": end_marks.as_json(),
        **(more or {}),
    }


def sampling_identity(params: Sequence[SamplingParams]) -> dict[str, Any] | None:
    """Return the parameters that all requests share; None where they differ in more than their seeds."""
    shared = [_as_json(one) | {"seed": None} for one in params]
    if not shared or any(one != shared[0] for one in shared):
        return None
    seeds = {one.seed for one in params}
    return shared[0] | ({"seed": params[0].seed} if len(seeds) == 1 else {"seed": "per request"})


def _as_json(params: SamplingParams) -> dict[str, Any]:
    values = {name: getattr(params, name) for name in params.__dataclass_fields__}
    processor, bias = values["logits_processor"], values["logit_bias"]
    values["logits_processor"] = None if processor is None else type(processor).__name__
    values["logit_bias"] = None if bias is None else {str(token): str(value) for token, value in bias.items()}
    return values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
