"""Generation over a data set: rows of prompts in, sealed shards out."""

import datetime
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ...hooks import Final
from ...models.head import save_head
from ...models.layer_ids import Convention, check_layer_ids
from ...models.loading import LoadedModel, ModelSource, load_model
from ..data import TokeniseOptions, Tokeniser, identity_of, source_identity
from ..data.sources import read_rows
from ..progress import Progress, Silent, Work
from ..store import OutputFolder
from .cached_model import CachedModel, cached_model
from .dataset_prompts import DatasetPrompts, dataset_prompts
from .generation_request import GenerationRequest
from .generation_run import GenerationOptions, GenerationRun
from .params import SamplingParams
from .prompts import PromptMaker
from .run_identity import generation_identity
from .shard_sink import ShardSink, require_empty, shard_sink


@dataclass(frozen=True)
class GenerationSettings:
    """One generation over a data set.

    model, data, out, layer_ids, convention, final, head: as those of an offline capture.
    params: of every row; row i samples with its seed + i.
    options: how steps are made.
    chat_template, template_args: of conversations.
    limit: read only so many input rows.
    """

    model: ModelSource
    data: tuple[str, ...]
    out: Path
    layer_ids: tuple[int, ...] | None
    params: SamplingParams
    convention: Convention = "layer_output"
    final: Final = "none"
    head: bool = False
    options: GenerationOptions = field(default_factory=GenerationOptions)
    chat_template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True)
class GenerationSummary:
    """Counts of a finished generation.

    captured, rejected: samples on disk, and rows that are in rejects.jsonl instead.
    rejected_by_code, finish_reasons: counted by a short word.
    prompt_tokens, new_tokens: of all requests.
    answers_dropped: conversations whose last turn was the assistant's and was written anew.
    shared_steps: whether requests of different lengths shared steps.
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
    notes: tuple[str, ...]


def generate_dataset(settings: GenerationSettings, progress: Progress | None = None) -> GenerationSummary:
    """Fill `settings.out`, an empty or new folder, with what the model answers to the rows of `settings.data`.

    Raises:
        UsageError: settings, ids, data or a folder that cannot be used; `StepError` where the model cannot be run so.
        RunError: the run failed; sealed shards stay. `HeadError` is one.
    """
    progress = progress or Silent()
    require_empty(settings.out)
    ids = _explicit(settings.layer_ids)
    loaded = load_model(settings.model)
    tokeniser = Tokeniser(_tokenise_options(settings))
    model = cached_model(loaded.model, ids, settings.convention, settings.final)
    run = GenerationRun(model, settings.options, tokeniser.tokenizer)
    rows = islice(read_rows(settings.data), settings.limit)
    found = dataset_prompts(rows, PromptMaker(tokeniser.tokenizer, tokeniser.template), run.prompt_fault)
    params = [_params_of_row(settings.params, place) for place in range(len(found.prompts))]
    requests, columns = run.requests(found.prompts, params), run.columns([settings.params])
    start = time.perf_counter()
    with model.attached():
        steps = run.settings(requests)
        about = {"tokenisation": identity_of(tokeniser).as_dict(), **_data_identity(settings)}
        identity = generation_identity(model, settings.convention, [settings.params], steps, loaded, about)
        with shard_sink(settings.out, columns, identity, settings.options.shard_rows, model.device) as sink:
            if settings.head:
                folder = OutputFolder(settings.out).head
                save_head(folder, loaded.model, model.norm_path, trust_remote_code=settings.model.trust_remote_code)
            progress.started(Work("generating", len(requests), unit="requests"))
            progress.advanced(rejected=len(found.rejects))
            run.loop(steps, partial(_write, sink, progress), progress=progress).run(requests)
            counts = sink.finish(found.rejects)
    seconds = time.perf_counter() - start
    return _summary(settings, loaded, model, found, requests, sink, counts, seconds, steps.shares_steps)


def _explicit(layer_ids: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ids, of which a folder of shards needs some: none at all are welcome in `generate_with_capture` alone."""
    return layer_ids if layer_ids else tuple(check_layer_ids(layer_ids, 0, algorithm="DSPARK"))


def _tokenise_options(settings: GenerationSettings) -> TokeniseOptions:
    return TokeniseOptions(
        tokenizer=settings.model.name,
        revision=settings.model.revision,
        trust_remote_code=settings.model.trust_remote_code,
        chat_template=settings.chat_template,
        template_args=settings.template_args,
        template_date=datetime.date.today().isoformat(),
    )


def _params_of_row(params: SamplingParams, place: int) -> SamplingParams:
    """Rows draw different random numbers, and the same ones in every run with the same seed."""
    return params if params.seed is None else replace(params, seed=(params.seed + place) % 2**63)


def _data_identity(settings: GenerationSettings) -> dict[str, Any]:
    return {"data": [{"name": source} | source_identity(source) for source in settings.data], "limit": settings.limit}


def _write(sink: ShardSink, progress: Progress, request: GenerationRequest) -> None:
    written = sink.add(request)
    progress.advanced(written=written, rejected=int(not written))


def _summary(
    settings: GenerationSettings,
    loaded: LoadedModel,
    model: CachedModel,
    found: DatasetPrompts,
    requests: list[GenerationRequest],
    sink: ShardSink,
    counts: dict[str, Any],
    seconds: float,
    shared_steps: bool,
) -> GenerationSummary:
    rejects = [*found.rejects, *(reject for shard in sink.shards for reject in shard.rejects)]
    return GenerationSummary(
        out=settings.out,
        captured=counts["captured"],
        rejected=len(rejects),
        rejected_by_code=dict(Counter(str(reject.detail.get("code", "other")) for reject in rejects).most_common()),
        finish_reasons=counts["finish_reasons"],
        prompt_tokens=sum(request.P for request in requests),
        new_tokens=sum(len(request.token_ids) for request in requests),
        answers_dropped=found.answers_dropped,
        rows=counts["rows"],
        shards=len(sink.shards),
        bytes=sum(shard.nbytes for shard in sink.shards),
        seconds=seconds,
        shared_steps=shared_steps,
        layer_ids=settings.layer_ids or (),
        convention=settings.convention,
        hidden_size=model.hidden_size,
        notes=loaded.notes,
    )
