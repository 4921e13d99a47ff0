"""What an earlier run left in the folder: its plan, its sealed shards, and what is to go."""

from __future__ import annotations

import datetime

from ...models.loading import LoadedModel
from ..data import Tokeniser, identity_of
from ..store import Manifest, OutputFolder, Plan, Shard
from .hugging_face import AttachedModel
from .identity import run_identity
from .planning import existing_plan, make_plan, require_same_identity
from .progress import Progress
from .settings import CaptureSettings
from .stopping import Stopping


def prepare_folder(
    settings: CaptureSettings,
    folder: OutputFolder,
    loaded: LoadedModel,
    attached: AttachedModel,
    progress: Progress,
    stopping: Stopping,
) -> Plan:
    """Make the folder ready to be filled: no stray file, the plan made or found, nothing that is not whole under a shard's name.

    Raises:
        UsageError: the folder holds another run; the message lists what differs.
        RunError: the plan could not be made.
    """
    folder.remove_stray_files()
    plan = existing_plan(folder)
    # A template that asks for today's date gets that of the first run on this folder.
    date = plan.extra["template_date"] if plan else datetime.date.today().isoformat()
    options = settings.text.tokenise_options(settings.model, date=date, vocab_rows=attached.decoder.vocab_rows)
    identity = run_identity(settings, loaded, attached, identity_of(Tokeniser(options)))
    if plan is None:
        plan = make_plan(settings, folder, options, identity, progress, stopping.check)
        Manifest.from_shards(identity, plan.summary(), [], complete=False).write(folder.manifest_path)
    else:
        require_same_identity(plan, identity, folder)
    _remove_what_is_not_whole(folder, plan, progress)
    return plan


def sealed_shards(folder: OutputFolder, plan: Plan) -> dict[int, Shard]:
    """The shards of `plan` that are done."""
    found = folder.sealed_shards().shards
    return {i: shard for i, shard in found.items() if i < len(plan.shards) and plan.shards[i].is_held_by(shard)}


def _remove_what_is_not_whole(folder: OutputFolder, plan: Plan, progress: Progress) -> None:
    found = folder.sealed_shards()
    for index in sorted((found.shards.keys() | found.broken.keys()) - sealed_shards(folder, plan).keys()):
        progress.note(f"{folder.shard_path(index).name} is not whole or not of this plan; it is made again")
        folder.shard_path(index).unlink()
