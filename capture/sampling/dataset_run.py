"""Generation over a data set: rows of prompts in, sealed shards out."""

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from ...hooks import find_taps_without_weights
from ...models.checkpoint import weight_sums
from ...models.head import has_head
from ...models.loaded_model import LoadedModel
from ...models.loading import load_model
from ..data import RecordEncoder, identity_of, source_identity
from ..data.records.sources import read_records
from ..identity import require_same_weights
from ..progress import Done, Progress, Silent, Work
from ..store import Manifest, OutputFolder, PlannedShard, kept_mass, plan_shards
from ..stored_head import write_head
from .dataset_prompts import dataset_prompts
from .generation.cached_model import cached_model
from .generation.loop import LoopSettings
from .generation.prompts import PromptMaker
from .generation.request import GenerationRequest
from .generation.run import GenerationRun
from .generation_settings import GenerationSettings, drawn_seed
from .generation_summary import GenerationSummary, summary_of
from .prompt_shards import PromptShards, earlier_generation, require_same_generation
from .run_identity import generation_identity
from .sampler.params import SamplingParams
from .shard_sink import RequestWriter


def generate_dataset(
    settings: GenerationSettings, progress: Progress | None = None, check_stop: Callable[[], None] = lambda: None
) -> GenerationSummary:
    """Fill `settings.out` with what the model answers to the rows of `settings.data`; resume where an earlier run stopped.

    Every shard has its own prompts, which run together. A resumed run makes the shards that are missing, byte for byte as a
    run that was never stopped makes them on the same machine.

    Args:
        check_stop: called while the weights are read again for a resumed run; may raise.

    Raises:
        UsageError: settings, ids, data or a folder that cannot be used; `StepError` where the model cannot be run so.
        RunError: the run failed; sealed shards stay, and the same call resumes from them. `HeadError` is one.
    """
    progress = progress or Silent()
    encoder = _checked_encoder(settings)
    loaded = load_model(settings.model)
    model = cached_model(loaded.model, settings.layers, settings.final, adapter=settings.adapter)
    tokenizer = encoder.tokenizer if encoder.has_tokenizer else None
    run = GenerationRun(model, settings.options, tokenizer, template=encoder.template if tokenizer else None)
    rows = islice(read_records(settings.data), settings.text.limit)
    fault = partial(run.prompt_fault, params=settings.params)
    found = dataset_prompts(rows, PromptMaker(encoder), fault)
    folder = OutputFolder(settings.out)
    with model.attached(), folder.lock():
        earlier = earlier_generation(settings.out)
        facts = _facts(settings, earlier, len(found.prompts), loaded, check_stop)
        params = [_params_of_row(settings.params, facts["seed"], place) for place in range(len(found.prompts))]
        requests, columns = run.requests(found.prompts, params), run.columns([settings.params])
        steps = run.settings(len(requests))
        about = {"tokenisation": identity_of(encoder).as_dict(), **_own_identity(settings)}
        identity = generation_identity(
            model.tapped, settings.layers, [settings.params], steps, run.end_marks, loaded, about
        )
        require_same_generation(earlier, identity, settings.out)
        writer = RequestWriter(columns, identity, model.device, drop_truncated=settings.drop_truncated)
        shards = PromptShards(folder, _planned(settings, requests, facts), identity, facts, writer)
        left = shards.resume(progress.note)
        if settings.head and not has_head(folder.head):
            write_head(
                folder.head, loaded.model, model.tapped.norm_path, trust_remote_code=settings.model.trust_remote_code
            )
        done = len(requests) - sum(shard.M for shard in left)
        progress.started(Work("generating", len(requests), unit="requests", done=done))
        progress.advanced(Done(rejected=len(found.rejects)))
        seconds = _fill(run, steps, shards, left, requests, progress)
        counts, endings = shards.finish(found.rejects)
    summary = summary_of(settings, loaded, model, found, requests, shards, counts, endings, seconds, steps.shares_steps)
    mass = kept_mass(shards.shards)
    return replace(
        summary,
        shards_done_before=len(shards.planned) - len(left),
        new_tokens_now=sum(len(requests[sample].token_ids) for shard in left for sample in shard.sample_index.tolist()),
        end_tokens=run.end_marks.as_json(),
        top_logits_share=None if mass is None else mass.mean,
        top_logits_quantiles=None if mass is None else mass.quantiles,
    )


def _fill(
    run: GenerationRun,
    steps: LoopSettings,
    shards: PromptShards,
    left: Sequence[PlannedShard],
    requests: Sequence[GenerationRequest],
    progress: Progress,
) -> float:
    """Make the shards that are left, one after the other; returns the seconds that it took."""
    start = time.perf_counter()
    for planned in left:
        own = [requests[sample] for sample in planned.sample_index.tolist()]
        with shards.filling(planned, own) as store:
            run.loop(steps, partial(_write, store, progress), progress=progress).run(own)
    return time.perf_counter() - start


def _checked_encoder(settings: GenerationSettings) -> RecordEncoder:
    """Return the tokenizer's side of a generation once all that needs no weights is checked, as a capture checks it.

    Raises:
        UsageError: the device, the model's config, the layers, the folder, the data or the tokenizer, in that order.
    """
    settings.model.require_device()
    find_taps_without_weights(settings.model, settings.layers, settings.final, adapter=settings.adapter)
    earlier = earlier_generation(settings.out)
    OutputFolder(settings.out).require_usable()
    read_records(settings.data)  # checks every name, and reads nothing yet
    date = None if earlier is None else earlier.identity["tokenisation"]["template_date"]
    return RecordEncoder(settings.text.tokenise_options(settings.model, date=date or datetime.date.today()))


def _facts(
    settings: GenerationSettings,
    earlier: Manifest | None,
    samples: int,
    loaded: LoadedModel,
    check_stop: Callable[[], None],
) -> dict[str, Any]:
    """Return what fixes the shards beside the identity: what the first run on the folder fixed, or this one does.

    Raises:
        RunError: the weights are not those of the first run, and there are shards to make.
    """
    if earlier is not None:
        if not earlier.complete:
            require_same_weights(earlier.plan["weights_crc32"], loaded.folder, settings.out, check_stop)
        return earlier.plan
    return {
        "samples": samples,
        "shard_rows": settings.shard_rows,
        "seed": drawn_seed(settings.params),
        "weights_crc32": weight_sums(loaded.folder, check_stop),
    }


def _planned(
    settings: GenerationSettings, requests: list[GenerationRequest], facts: Mapping[str, Any]
) -> Sequence[PlannedShard]:
    """Return which prompts share a shard: each counts the most rows that it can have."""
    return plan_shards([request.P + settings.params.max_new_tokens - 1 for request in requests], facts["shard_rows"])


def _params_of_row(params: SamplingParams, seed: int, place: int) -> SamplingParams:
    """Rows draw different random numbers, and the same ones in every run with the same seed."""
    return replace(params, seed=(seed + place) % 2**63)


def _own_identity(settings: GenerationSettings) -> dict[str, Any]:
    return {
        "data": [{"name": source} | source_identity(source) for source in settings.data],
        "limit": settings.text.limit,
        "shard_rows": settings.shard_rows,
        "drop_truncated": settings.drop_truncated,
    }


def _write(store: Callable[[GenerationRequest], int], progress: Progress, request: GenerationRequest) -> None:
    written = store(request)
    progress.advanced(Done(written=written, rejected=int(not written)))
