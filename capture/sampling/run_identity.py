"""What the shards of a generation say of how they were made, in the words of an offline run's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...models.layer_ids import Convention, from_boundaries
from ...models.loading import LoadedModel
from ..identity import dtype_name, tapped_identity
from .cached_model import CachedModel
from .generation_loop import LoopSettings
from .params import SamplingParams


def generation_identity(
    model: CachedModel,
    convention: Convention,
    params: Sequence[SamplingParams],
    settings: LoopSettings,
    loaded: LoadedModel | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Model, taps, sampling and how steps were made, as JSON values.

    loaded: where the model came from, if it was loaded from somewhere known.
    more: what the caller knows of tokeniser and data.
    """
    return {
        **tapped_identity(model, from_boundaries(model.taps.boundaries, convention), convention, loaded),
        "store_dtype": dtype_name(model.dtype),
        "mode": "generation",
        "sampling": _sampling(params),
        "steps": asdict(settings),
        **(more or {}),
    }


def _sampling(params: Sequence[SamplingParams]) -> dict[str, Any] | None:
    """The parameters that all requests share; None where they differ in more than their seeds."""
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
