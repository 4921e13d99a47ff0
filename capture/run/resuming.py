"""Resuming: the plan and sealed shards of an earlier run, and what of its files must go."""

from __future__ import annotations

import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ...models.config import stated_positions
from ...models.decoder import Decoder
from ...models.head import has_head, head_bytes
from ..data import RecordEncoder, TokeniseOptions, identity_of
from ..identity import require_same_weights
from ..progress import Progress
from ..settings import TextSettings
from ..store import Manifest, OutputFolder, Plan, SealedShards, Shard
from ..weights_read import checked_weight_sums
from .backend import Backend
from .identity import run_identity
from .planned_images import require_same_images
from .planning import make_plan, require_same_identity
from .settings import STORE_DTYPES, CaptureSettings
from .space import bytes_of_rows, require_space
from .stopping import Stopping
from .taken_up import is_of, plan_again, plan_there, require_same_run


def prepare_folder(
    backend: Backend[Any], folder: OutputFolder, progress: Progress, stopping: Stopping
) -> tuple[Plan, dict[int, Shard]]:
    """Make the folder ready to be filled: no stray file, the plan made or found, nothing that is not whole under a shard's name.

    Returns the plan and those of its shards that are done.

    Raises:
        UsageError: the folder holds another run; the message lists what differs. Or shards that no run made.
        RunError: the plan could not be made, shards contradict it and the data, the weights changed, or the disk has too
            little room. Nothing is removed then.
    """
    settings, attached = backend.settings, backend.attached
    folder.remove_stray_files()
    sealed = folder.sealed_shards()
    plan, fault = plan_there(folder, sealed)
    text = fitted_to(attached.decoder, settings.text, progress)
    date = plan.extra.template_date if plan and not fault else _date_of(sealed)
    options = text.tokenise_options(settings.model, date=date, vocab_rows=attached.decoder.vocab_rows)
    encoder = RecordEncoder(options)
    identity = run_identity(backend, identity_of(encoder))

    def make(place: Path) -> Plan:
        notes = encoder.notes()
        for note in notes:
            progress.note(note)
        sums = partial(checked_weight_sums, backend.loaded.folder, progress, stopping.check)
        return make_plan(settings, folder, place, encoder, identity, sums, progress, stopping.check, notes)

    if fault or (plan is None and sealed.broken):
        require_same_run(folder, sealed, identity)
        plan = plan_again(folder, sealed, str(fault), make, progress)
    elif plan is None:
        plan = make(folder.plan)
    else:
        require_same_identity(plan, identity, folder)
        require_same_images(plan)
        if len(sealed.shards) < len(plan.shards):
            stated = plan.extra.weights_crc32  # a plan of an earlier release has none
            require_same_weights(stated, backend.loaded.folder, folder.path, stopping.check, progress)
    _make_room_for_broken(folder, plan, sealed, progress)
    left = plan.R - sum(shard.R for shard in sealed.shards.values())
    columns = attached.columns(STORE_DTYPES[identity["store_dtype"]], is_text=plan.has_images)
    head = 0 if not settings.head or has_head(folder.head) else head_bytes(backend.loaded.model, attached.norm_path)
    require_space(folder.path, bytes_of_rows(columns, left) + head, force=settings.force)
    return plan, sealed.shards


def tokenise_options(settings: CaptureSettings, plan: Plan) -> TokeniseOptions:
    """Return the options that tokenized the rows of `plan`, to make model inputs of them again."""
    return settings.text.tokenise_options(settings.model, date=plan.extra.template_date, vocab_rows=None)


def fitted_to(decoder: Decoder, text: TextSettings, progress: Progress) -> TextSettings:
    """Return `text` with at most as many tokens per sample as the model has positions."""
    fitted, note = text.fitted_to(stated_positions(getattr(decoder.model, "config", None)))
    if note is not None:
        progress.note(note)
    return fitted


def sealed_shards(folder: OutputFolder, plan: Plan) -> dict[int, Shard]:
    """Return the sealed shards of `plan`: its samples, under its identity."""
    return _those_of(plan, folder.sealed_shards().shards)


def is_sealed(folder: OutputFolder, plan: Plan, index: int) -> bool:
    """Return whether that shard of `plan` is sealed."""
    path = folder.shard_path(index)
    if not path.exists():
        return False
    with Shard(path) as shard:
        return is_of(shard, index, plan)


def _those_of(plan: Plan, shards: dict[int, Shard]) -> dict[int, Shard]:
    return {i: shard for i, shard in shards.items() if is_of(shard, i, plan)}


def _date_of(sealed: SealedShards) -> str:
    """Return the date for templates that use one: that of the first run on this folder, from its shards."""
    for shard in sealed.shards.values():
        date = shard.description.tokenisation.get("template_date")
        if date is not None:
            return str(date)
    return datetime.date.today().isoformat()


def _make_room_for_broken(folder: OutputFolder, plan: Plan, sealed: SealedShards, progress: Progress) -> None:
    """Remove what has a shard's name and is proved damaged: by its own checksums, read twice, under a plan that holds.

    Before that the manifest says that the folder is not complete, whatever it said.
    """
    if len(sealed.shards) < len(plan.shards):
        shards = sealed.shards.values()
        Manifest.from_shards(plan.identity, plan.summary(), shards, complete=False).write(folder.manifest_path)
    for index, error in sorted(sealed.broken.items()):
        progress.note(f"{folder.shard_path(index).name} is not whole and is made again: {error}")
        folder.remove_shard(index)
