"""What an earlier run left in the folder: its plan, its sealed shards, and what is to go."""

from __future__ import annotations

import datetime
from dataclasses import replace

from ...models.config import stated_positions
from ...models.decoder import Decoder
from ...models.errors import UsageError
from ...models.loading import LoadedModel
from ..data import TokeniseOptions, Tokeniser, identity_of
from ..progress import Progress
from ..store import Manifest, OutputFolder, Plan, Shard
from .hugging_face import AttachedModel
from .identity import run_identity
from .planned_images import require_same_images
from .planning import existing_plan, identity_differences, make_plan, require_same_identity
from .settings import STORE_DTYPES, CaptureSettings, TextSettings
from .space import bytes_of_rows, require_space
from .stopping import Stopping


def prepare_folder(
    settings: CaptureSettings,
    folder: OutputFolder,
    loaded: LoadedModel,
    attached: AttachedModel,
    progress: Progress,
    stopping: Stopping,
) -> tuple[Plan, dict[int, Shard]]:
    """Make the folder ready to be filled: no stray file, the plan made or found, nothing that is not whole under a shard's name.

    Returns the plan and those of its shards that are done.

    Raises:
        UsageError: the folder holds another run; the message lists what differs. Or shards that no plan speaks of.
        RunError: the plan could not be made, or the disk has too little room for it.
    """
    folder.remove_stray_files()
    plan = existing_plan(folder)
    # A template that asks for today's date gets that of the first run on this folder.
    date = plan.extra["template_date"] if plan else datetime.date.today().isoformat()
    text = fitted_to(attached.decoder, settings.text, progress)
    options = text.tokenise_options(settings.model, date=date, vocab_rows=attached.decoder.vocab_rows)
    identity = run_identity(settings, loaded, attached, identity_of(Tokeniser(options)))
    if plan is None:
        _refuse_what_has_no_plan(folder)
        plan = make_plan(settings, folder, options, identity, progress, stopping.check)
    else:
        require_same_identity(plan, identity, folder)
        require_same_images(plan)
    done = _kept_when_whole(folder, plan, progress)
    left = plan.R - sum(shard.R for shard in done.values())
    columns = attached.columns(STORE_DTYPES[identity["store_dtype"]], is_text=plan.has_images)
    require_space(folder.path, bytes_of_rows(columns, left), force=settings.force)
    return plan, done


def tokenise_options(settings: CaptureSettings, plan: Plan) -> TokeniseOptions:
    """How the rows of `plan` were tokenised, for whoever makes inputs of them again."""
    return settings.text.tokenise_options(settings.model, date=plan.extra["template_date"], vocab_rows=None)


def fitted_to(decoder: Decoder, text: TextSettings, progress: Progress) -> TextSettings:
    """`text` with no more tokens a sample than the model has positions."""
    most = stated_positions(getattr(decoder.model, "config", None))
    if most is None or most >= text.max_length:
        return text
    progress.note(f"the model has {most} positions, so samples are held to {most} tokens instead of {text.max_length}")
    return replace(text, max_length=most)


def sealed_shards(folder: OutputFolder, plan: Plan) -> dict[int, Shard]:
    """The shards of `plan` that are done: its samples, captured as its identity says."""
    return _those_of(plan, folder.sealed_shards().shards)


def is_sealed(folder: OutputFolder, plan: Plan, index: int) -> bool:
    """Whether that shard of `plan` is done."""
    path = folder.shard_path(index)
    if not path.exists():
        return False
    with Shard(path) as shard:
        return _is_of(shard, index, plan)


def _those_of(plan: Plan, shards: dict[int, Shard]) -> dict[int, Shard]:
    return {i: shard for i, shard in shards.items() if _is_of(shard, i, plan)}


def _is_of(shard: Shard, index: int, plan: Plan) -> bool:
    if index >= len(plan.shards) or not plan.shards[index].is_held_by(shard):
        return False
    return not identity_differences(shard.metadata, plan.identity)


def _refuse_what_has_no_plan(folder: OutputFolder) -> None:
    """Shards without a plan are those of a generation or an import, or a plan was lost: they are never written over."""
    found = folder.sealed_shards()
    if found.shards or found.broken:
        raise UsageError(
            f"{folder.path} holds {len(found.shards) + len(found.broken)} shard(s) and no plan: a generation, an import, or a "
            "run whose plan was removed. Choose another folder, or remove the shards first."
        )


def _kept_when_whole(folder: OutputFolder, plan: Plan, progress: Progress) -> dict[int, Shard]:
    """The shards of `plan` that are done; what else lies under a shard's name is removed.

    Before that the manifest says that the folder is not complete, whatever it said.
    """
    found = folder.sealed_shards()
    done = _those_of(plan, found.shards)
    if len(done) < len(plan.shards):
        Manifest.from_shards(plan.identity, plan.summary(), done.values(), complete=False).write(folder.manifest_path)
    for index in sorted((found.shards.keys() | found.broken.keys()) - done.keys()):
        progress.note(f"{folder.shard_path(index).name} is not whole or not of this plan; it is made again")
        folder.shard_path(index).unlink()
    return done
