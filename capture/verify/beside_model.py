"""Some samples of a folder beside the model, or, where there is none, beside the stored head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError

from ...models.head import Head, HeadError, has_head, load_head
from ...models.loaded_model import LoadedModel
from ...models.model_source import ModelSource
from ..progress import Done, Progress, Work
from ..store import Finding, OutputFolder, Shard
from ..store.checks import Severity
from .chosen import ChosenSample, chosen_places, read_chosen
from .comparison import Comparison
from .declared import Declaration
from .plain_forward import NoReferenceError, PlainForward
from .prediction import in_words, is_whole, judge_predictions, predict, predicting_tap
from .reference_model import HALF, ReferenceModel, reference_model
from .report import TapAgreement
from .verdict import merged
from .vocabulary import known_ids, vocabulary_of, vocabulary_of_model

# So many are judged together, and held in memory meanwhile: a repair looks at one of every shard.
SAMPLES_AT_ONCE = 16


@dataclass(frozen=True)
class BesideModel:
    """Result of the comparison; see `Report`.

    same_model: no sign that the model is another than the captured one. weights: where its files are, None without a model.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    agreement: tuple[TapAgreement, ...] = ()
    compared: int = 0
    reference: str | None = None
    same_model: bool = True
    weights: Path | None = None


def beside_model(
    folder: OutputFolder,
    shards: Iterable[Shard],
    model: str | Path | ModelSource | None,
    samples: int,
    progress: Progress,
    *,
    each_shard: bool,
    trust_remote_code: bool = False,
) -> BesideModel:
    """Compare `samples` of the shards' samples; see `verify`."""
    places = chosen_places(shards, samples, each_shard=each_shard)
    declarations, silent = _declarations(shard for shard, _ in places)
    with_images: list[ChosenSample] = []
    chosen = _of_text(read_chosen([place for place in places if place[0].path in declarations]), with_images)
    first = next(chosen, None)
    if first is None:
        return BesideModel(tuple(silent), ("no sample was compared with a model", *_images_note(with_images)))
    chosen = chain([first], chosen)
    reference = reference_model(declarations[first.name.path], model, trust_remote_code=trust_remote_code)
    head, broken = _stored_head(folder)
    told = [*silent, *broken, *(_finding(folder.path, what, "warning") for what in reference.differences)]
    strange: list[Finding] = []
    if reference.loaded is None:
        known = known_ids(chosen, vocabulary_of(head.lm_head) if head else None, strange)
        found = _head_alone(known, declarations, head)
        found = replace(found, notes=(f"no sample was compared with a model: {reference.note}", *found.notes))
    else:
        progress.started(Work("comparing with the model", len(places)))
        known = known_ids(chosen, vocabulary_of_model(reference.loaded.model), strange)
        found = _compared(known, declarations, reference, reference.loaded, head, folder, progress)
    notes = (*found.notes, *_images_note(with_images))
    return replace(
        found,
        findings=(*told, *strange, *found.findings),
        notes=notes,
        same_model=not reference.differences,
        weights=reference.loaded.folder if reference.loaded else None,
    )


def _of_text(samples: Iterable[ChosenSample], with_images: list[ChosenSample]) -> Iterator[ChosenSample]:
    """Yield the samples of text; those with images go to `with_images` without their rows."""
    for sample in samples:
        if sample.has_images:
            with_images.append(replace(sample, columns={}))
        else:
            yield sample


def _images_note(with_images: list[ChosenSample]) -> tuple[str, ...]:
    count = len(with_images)
    return (f"{count} sample(s) with images were not compared: a shard holds no pictures",) if count else ()


def _compared(
    chosen: Iterator[ChosenSample],
    declarations: dict[Path, Declaration],
    reference: ReferenceModel,
    loaded: LoadedModel,
    head: Head | None,
    folder: OutputFolder,
    progress: Progress,
) -> BesideModel:
    first = next(chosen, None)
    if first is None:
        return BesideModel()
    chosen = chain([first], chosen)
    declaration = declarations[first.name.path]
    count, forwards = 0, reference.forwards(loaded)

    def advanced(sample: ChosenSample) -> None:
        progress.advanced(Done(1, len(sample.input_ids)))

    with _threads(declaration.threads):
        try:
            plain = PlainForward(loaded.model, declaration.layers_path, declaration.n)
            half = declaration.dtype in HALF
            comparison = Comparison(loaded.model, plain, forwards, head, declarations, half, advanced)
            for some in _together(chosen, forwards.tokens_at_once):
                comparison.add(some)
                comparison.decide()
                count += len(some)
        except NoReferenceError as error:
            return BesideModel((_finding(folder.path, f"not compared with the model: {error}", "error"),))
    source = f"{plain.source}, computed in {declaration.dtype}, {forwards.told}"
    return BesideModel(
        tuple(merged(comparison.verdicts)), _not_shown(declaration), comparison.agreement(), count, source
    )


def _not_shown(declaration: Declaration) -> tuple[str, ...]:
    left_out = [tap.label for tap in declaration.taps if tap not in declaration.comparable_taps]
    if not left_out:
        return ()
    return (
        f"{', '.join(left_out)} were not compared: adapter {declaration.adapter} reads what no plain forward shows",
    )


def _together(chosen: Iterable[ChosenSample], tokens: int) -> Iterator[list[ChosenSample]]:
    """Yield lists of at most `SAMPLES_AT_ONCE` samples, of `tokens` together where they are more than one."""
    some: list[ChosenSample] = []
    for sample in chosen:
        if len(some) == SAMPLES_AT_ONCE or (some and sum(len(s.input_ids) for s in [*some, sample]) > tokens):
            yield some
            some = []
        some.append(sample)
    if some:
        yield some


def _head_alone(
    chosen: Iterable[ChosenSample], declarations: dict[Path, Declaration], head: Head | None
) -> BesideModel:
    """Compare the stored head's predictions from stored rows with the tokens that follow."""
    if head is None or not is_whole(head):
        return BesideModel()
    predictions = []
    for sample in chosen:
        declaration = declarations[sample.name.path]
        tap = predicting_tap(declaration.taps, declaration.n)
        prediction = predict(sample, tap, head) if tap else None
        predictions += [prediction] if prediction else []
    told = in_words(predictions)
    return BesideModel(tuple(merged(judge_predictions(predictions))), (told,) if told else ())


def _declarations(shards: Iterable[Shard]) -> tuple[dict[Path, Declaration], list[Finding]]:
    found: dict[Path, Declaration] = {}
    silent = []
    for shard in dict.fromkeys(shards):
        try:
            found[shard.path] = Declaration.of(shard)
        except ValueError as error:
            silent.append(_finding(shard.path, f"not compared with a model: {error}", "error"))
    return found, silent


def _stored_head(folder: OutputFolder) -> tuple[Head | None, list[Finding]]:
    if not has_head(folder.head):
        return None, []
    try:
        return load_head(folder.head), []
    except (HeadError, SafetensorError) as error:
        return None, [_finding(folder.head, f"the head cannot be read: {error}", "error")]


def _finding(path: Path, what: str, severity: Severity) -> Finding:
    return Finding(str(path), None, None, what, severity)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use as many threads as the run did: float32 bits change with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
