"""Checks of a run before its model's weights are read, which may take an hour."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..data import RecordEncoder, identity_of, read_records, source_identity
from ..progress import Progress, Silent
from ..store import OutputFolder, Plan
from .attached_model import AttachedModel, described
from .backend import EngineKind
from .identity import settings_identity, tap_choice
from .planning import require_agreement
from .resuming import fitted_to
from .settings import CaptureSettings
from .taken_up import believed_plan


def preflight(
    settings: CaptureSettings, kind: EngineKind, progress: Progress, *, folder_is_held: bool = False
) -> AttachedModel | None:
    """Check the config and the layers, then the folder, the data and the tokenizer of a run; write nothing.

    folder_is_held: whether this run has the folder's lock already.

    Returns what the config says of the model, or None where a model cannot be described without its weights: its layers
    are then checked once these are loaded.

    Raises:
        UsageError: what of `settings` cannot be used, in that order; for a folder of another run what differs.
    """
    attached = described(settings)
    if attached is None:
        progress.note("the model cannot be built without its weights, so its layers are checked once it is loaded")
    folder = OutputFolder(settings.out)
    if not folder_is_held:
        folder.require_usable()
    records = read_records(settings.data)  # looks for each of them
    plan = believed_plan(folder)
    date = plan.extra.template_date if plan else datetime.date.today().isoformat()
    text = settings.text if attached is None else fitted_to(attached.decoder, settings.text, Silent())
    vocab_rows = None if attached is None else attached.decoder.vocab_rows
    encoder = RecordEncoder(text.tokenise_options(settings.model, date=date, vocab_rows=vocab_rows))
    for record in islice(records, 1):
        encoder.item(record)  # loads the tokenizer, unless the data are token ids
    if plan is not None and attached is not None:
        known: dict[str, Any] = {
            **settings_identity(settings),
            **kind.identity(settings),
            **_changed_data(settings.data, plan),
            "taps": tap_choice(settings, attached.taps),
            "tokenisation": identity_of(encoder).as_dict(),
        }
        require_agreement(plan, known, folder)
    return attached


def _changed_data(sources: Sequence[str], plan: Plan) -> dict[str, Any]:
    """Return the identity of the data where names or sizes show already that it is not the plan's; nothing is hashed else."""
    there = [entry.get("bytes", entry.get("name")) for entry in plan.identity["data"]]
    now = [Path(source).stat().st_size if Path(source).is_file() else source for source in sources]
    return {} if now == there else {"data": [source_identity(source) for source in sources]}
