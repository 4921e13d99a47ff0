"""The summary of a generation over a data set."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.loaded_model import LoadedModel
from .dataset_prompts import DatasetPrompts
from .generation.cached_model import CachedModel
from .generation.request import GenerationRequest
from .generation_settings import GenerationSettings
from .prompt_shards import Endings, PromptShards


@dataclass(frozen=True)
class GenerationSummary:
    """Counts of a finished generation.

    captured, rejected: samples on disk, and rows that are in rejects.jsonl instead.
    rejected_by_code, finish_reasons: counted by a short word.
    prompt_tokens: of all requests. new_tokens: of the captured ones.
    answers_dropped: conversations whose last turn was the assistant's and was written anew.
    unread_fields: fields of the rows that nothing read, counted by name.
    shared_steps: whether requests of different lengths shared steps.
    end_tokens: ids of the tokens that end an answer, by who names them.
    top_logits_share: mean probability that the stored top logits of a row hold together, None where none are stored.
    top_logits_quantiles: the 0.05, 0.5 and 0.95 quantiles of this probability over the rows, by level.
    shards_done_before: how many shards an earlier run had sealed.
    new_tokens_now, seconds: tokens that this run generated, and how long it took.
    """

    out: Path
    captured: int
    rejected: int
    rejected_by_code: dict[str, int]
    finish_reasons: dict[str, int]
    prompt_tokens: int
    new_tokens: int
    answers_dropped: int
    rows: int
    shards: int
    bytes: int
    seconds: float
    shared_steps: bool
    layer_ids: tuple[int, ...]
    convention: str
    hidden_size: int
    unread_fields: dict[str, int]
    notes: tuple[str, ...]
    end_tokens: dict[str, list[int]]
    top_logits_share: float | None
    shards_done_before: int
    new_tokens_now: int
    top_logits_quantiles: dict[str, float] | None = None


def summary_of(
    settings: GenerationSettings,
    loaded: LoadedModel,
    model: CachedModel,
    found: DatasetPrompts,
    requests: list[GenerationRequest],
    shards: PromptShards,
    counts: dict[str, Any],
    endings: Endings,
    seconds: float,
    shared_steps: bool,
) -> GenerationSummary:
    rejects = [*found.rejects, *(reject for shard in shards.shards for reject in shard.rejects)]
    ids, convention = settings.layers.as_ids(model.taps.boundaries)
    return GenerationSummary(
        out=settings.out,
        captured=counts["captured"],
        rejected=len(rejects),
        rejected_by_code=dict(Counter(reject.code for reject in rejects).most_common()),
        finish_reasons=counts["finish_reasons"],
        prompt_tokens=sum(request.P for request in requests),
        new_tokens=endings.new_tokens,
        answers_dropped=found.answers_dropped,
        rows=counts["rows"],
        shards=len(shards.shards),
        bytes=sum(shard.nbytes for shard in shards.shards),
        seconds=seconds,
        shared_steps=shared_steps,
        layer_ids=ids,
        convention=convention,
        hidden_size=model.tapped.hidden_size,
        unread_fields=dict(found.unread.most_common()),
        notes=loaded.notes,
        end_tokens={},
        top_logits_share=None,
        shards_done_before=0,
        new_tokens_now=0,
    )
