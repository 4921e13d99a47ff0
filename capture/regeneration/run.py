"""A regeneration: answers written piece by piece, then captured by a plain forward over the finished samples."""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ...hooks import find_taps_without_weights
from ...models.checkpoint import weight_sums
from ...models.loaded_model import LoadedModel
from ...models.loading import describe_model
from ..data import RecordEncoder, identity_of, source_identity
from ..data.records.items import RawRecord
from ..data.records.sources import read_records
from ..identity import model_identity, require_same_weights
from ..progress import Done, Progress, Silent, Work
from ..run import CaptureSettings, Stopping, capture_dataset
from ..sampling.generation_settings import GenerationSettings, drawn_seed
from ..sampling.prompt_shards import holds_something_else, was_just_begun
from ..sampling.run_identity import sampling_identity
from ..settings import TextSettings
from ..store import Manifest, OutputFolder
from ..store.folder import ANSWERS
from .dialogue import prompt_of
from .engine import AnswerEngine, AnswerEngineKind, answer_engine_kind
from .pieces import MESSAGES_FILE, AnswerFolder, turns_of
from .row import Job, Row
from .summary import RegenerationSummary, answer_counts

_ANY_LENGTH = 2**31 - 1  # what was written fits the model already


@dataclass(frozen=True)
class _Written:
    """The pieces of a folder of answers, and what this run did of them: pieces found, tokens written, seconds."""

    manifest: Manifest
    pieces: int
    before: int
    tokens: int
    seconds: float


def regenerate_dataset(
    settings: GenerationSettings, progress: Progress | None = None, stopping: Stopping | None = None
) -> RegenerationSummary:
    """Write the turns of `settings.data` anew into `settings.out`, and capture the finished samples; resume an earlier run.

    The answers are stored as tokens. The rows come from one plain forward over each finished sample, so that every token has
    one row, whatever the template made of earlier turns.

    Raises:
        UsageError: settings, data or a folder that cannot be used.
        RunError: the run failed; sealed pieces and shards stay, and the same call resumes from them. `RunStopped` is one.
    """
    progress, stopping = progress or Silent(), stopping or Stopping()
    kind = answer_engine_kind(settings)
    answers = AnswerFolder(OutputFolder(settings.out).answers)
    encoder = _checked_encoder(settings, answers)
    with OutputFolder(settings.out).lock():
        written = _written(settings, kind, encoder, answers, progress, stopping)
    gc.collect()  # the capture loads the model again
    capture = capture_dataset(_capture_settings(settings, answers), progress, stopping)
    counts = {
        key: value for key, value in written.manifest.counts.items() if key not in ("captured", "rows", "rejected")
    }
    return RegenerationSummary(
        out=settings.out,
        capture=capture,
        end_tokens=written.manifest.plan["end_tokens"],
        pieces=written.pieces,
        pieces_done_before=written.before,
        new_tokens_now=written.tokens,
        seconds=written.seconds,
        messages=answers.path / MESSAGES_FILE,
        **counts,
    )


def _checked_encoder(settings: GenerationSettings, answers: AnswerFolder) -> RecordEncoder:
    """Return the tokenizer's side of the run once all that needs no weights is checked.

    Raises:
        UsageError: the device, the model's config, the layers, the folder, the data or the tokenizer, in that order.
    """
    settings.model.require_device()
    find_taps_without_weights(settings.model, settings.layers, settings.final, adapter=settings.adapter)
    OutputFolder(settings.out).require_usable()
    earlier = answers.manifest()
    if earlier is None and not was_just_begun(settings.out, ANSWERS):
        raise holds_something_else(settings.out)
    read_records(settings.data)  # checks every name, and reads nothing yet
    date = None if earlier is None else earlier.identity["tokenisation"]["template_date"]
    return RecordEncoder(settings.text.tokenise_options(settings.model, date=date or datetime.date.today()))


def _written(
    settings: GenerationSettings,
    kind: AnswerEngineKind,
    encoder: RecordEncoder,
    answers: AnswerFolder,
    progress: Progress,
    stopping: Stopping,
) -> _Written:
    """Write every piece of answers that is not there yet."""
    described = describe_model(settings.model)
    manifest = _begun(settings, kind, encoder, answers, described, stopping)
    if manifest.complete:
        return _Written(manifest, manifest.plan["pieces"], manifest.plan["pieces"], 0, 0.0)
    rows = manifest.identity["piece_rows"]
    job = Job(settings, encoder, manifest.plan["seed"])
    before = count = tokens = 0
    with kind.opened(settings, encoder, progress) as engine:
        progress.started(Work("generating", unit="answers"))
        start = time.perf_counter()
        for index, records in enumerate(_pieces(islice(read_records(settings.data), settings.text.limit), rows)):
            count = index + 1
            if answers.piece(index).exists():
                before += 1
                continue
            lines = _answered(
                engine, [Row(record, index * rows + at, job) for at, record in enumerate(records)], stopping
            )
            answers.seal(index, lines)
            tokens += sum(turn["tokens"] for turn in turns_of(lines))
            progress.advanced(Done(rejected=sum("rejected" in line for line in lines)))
        seconds = time.perf_counter() - start
        facts = {**manifest.plan, "end_tokens": engine.end_marks.as_json()}
    done = answers.finish(replace(manifest, plan=facts), count, answer_counts(answers.lines(count)))
    return _Written(done, count, before, tokens, seconds)


def _begun(
    settings: GenerationSettings,
    kind: AnswerEngineKind,
    encoder: RecordEncoder,
    answers: AnswerFolder,
    described: LoadedModel,
    stopping: Stopping,
) -> Manifest:
    """Return the manifest of the answers: of an earlier run that asked the same weights for the same, or a new one."""
    identity = {
        "mode": ANSWERS,
        "engine": settings.engine,
        "turns": settings.turns,
        "drop_truncated": settings.drop_truncated,
        "sampling": sampling_identity([settings.params]),
        **kind.identity(settings),
        "piece_rows": kind.piece_rows(settings),
        "model": model_identity(described.model, described),
        "dtype": settings.model.dtype,
        "attn_implementation": settings.model.attn_implementation,
        "tokenisation": identity_of(encoder).as_dict(),
        "data": [source_identity(source) for source in settings.data],
        "limit": settings.text.limit,
    }
    earlier = answers.earlier(identity)
    if earlier is None:
        sums = weight_sums(described.folder, stopping.check)
        return answers.begin(identity, {"seed": drawn_seed(settings.params), "weights_crc32": sums})
    if not earlier.complete:
        require_same_weights(earlier.plan["weights_crc32"], described.folder, settings.out, stopping.check)
    return earlier


def _answered(engine: AnswerEngine, rows: Sequence[Row], stopping: Stopping) -> list[dict[str, Any]]:
    """Answer the rows of a piece, turn after turn; returns a line for each."""
    while asked := [(row, ids) for row in rows for ids in row.next_prompts(engine)]:
        prompts = [prompt_of(ids, row.sample_id, row.record.source, row.record.line) for row, ids in asked]
        params = [row.params(ids, engine.max_positions) for row, ids in asked]
        for (row, ids), answer in zip(asked, engine.answers(prompts, params), strict=True):
            row.take(ids, answer)
        stopping.check()
    return [row.line() for row in rows]


def _pieces(records: Iterable[RawRecord], rows: int) -> Iterator[list[RawRecord]]:
    """Yield consecutive records, `rows` at a time."""
    left = iter(records)
    while piece := list(islice(left, rows)):
        yield piece


def _capture_settings(settings: GenerationSettings, answers: AnswerFolder) -> CaptureSettings:
    """Return the capture of the finished samples: the same places, layers and model."""
    text = settings.text
    return CaptureSettings(
        settings.model,
        settings.data,
        settings.out,
        settings.layer_ids,
        convention=settings.convention,
        ids_of=settings.ids_of,
        draft_config=settings.draft_config,
        algorithm=settings.algorithm,
        adapter=settings.adapter,
        final=settings.final,
        head=settings.head,
        shard_rows=settings.shard_rows,
        top_logits=settings.params.top_logits,
        answers=answers.path,
        text=TextSettings(
            max_length=_ANY_LENGTH,
            limit=text.limit,
            chat_template=text.chat_template,
            template_args=text.template_args,
            allow_rejects=True,
        ),
    )
