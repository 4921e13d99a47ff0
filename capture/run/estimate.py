"""The dry run: samples, disk space and time of a run, without writing anything."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from ...models.checkpoint import has_weights
from ...models.errors import UsageError
from ..data import Audit, RecordEncoder, TokeniseOptions, audit, image_processor_of, tokenise
from ..progress import Progress, Silent
from .attached_model import AttachedModel
from .backend import Backend, kind_of, opened_backend
from .batches import SampleRows
from .distributed.ranks import Ranks
from .pacing.block_estimate import BlockEstimate, block_estimate
from .pacing.block_pacer import BlockPacer
from .pacing.forwards import Forwards
from .pacing.pace import Pacer
from .pacing.timing import KEPT_ROWS, KeptSamples, tokens_per_second
from .planned_images import require_images_taken
from .planned_taps import PlannedTap, planned_taps
from .planning import with_progress
from .preflight import preflight
from .resuming import fitted_to
from .settings import STORE_DTYPES, CaptureSettings
from .space import bytes_of_rows, free_bytes

TRIED_BATCHES = 8  # of a block of streamed weights: each of them passes every layer


@dataclass(frozen=True)
class RunEstimate:
    """The audit of the input, and what capturing it would cost.

    Attributes:
        bytes_needed, bytes_free: of the rows, and of the disk.
        tokens_per_second: of the forward, tried on samples of the input; 0 where there were none, or no weights.
        taps: what would be tapped, in slot order.
        untimed: why no forward was timed; None where some were.
        block: of a run with streamed weights, None for others.
    """

    audit: Audit
    bytes_needed: int
    bytes_free: int
    tokens_per_second: float
    taps: tuple[PlannedTap, ...]
    untimed: str | None = None
    block: BlockEstimate | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds of all forwards of the run, without loading and tokenizing."""
        return self.audit.tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    @property
    def fits(self) -> bool:
        return self.bytes_needed <= self.bytes_free


def estimate_run(settings: CaptureSettings, progress: Progress | None = None) -> RunEstimate:
    """Check what a run would check, tokenise its input, time a few forwards, and add up.

    A folder without weights gives an estimate without a time. Raises as `capture_dataset` does.
    """
    if settings.tp > 1:
        raise UsageError("a dry run times the forwards of one process; leave tp (--tp) out, or see `hiddentap audit`.")
    progress, kind = progress or Silent(), kind_of(settings)
    attached = preflight(settings, kind, progress)
    if attached is None:
        backend = opened_backend(kind, settings, Ranks())
        return _timed(backend, *_counted(settings, backend.attached, progress), progress)
    counted = _counted(settings, attached, progress)
    folder = Path(settings.model.name)
    if folder.is_dir() and not has_weights(folder):
        audited, kept, _ = counted
        needed = bytes_of_rows(
            attached.columns(_store_dtype(settings, attached), is_text=kept.have_images), audited.tokens
        )
        return RunEstimate(
            audited, needed, free_bytes(settings.out), 0.0, planned_taps(settings, attached), f"{folder} has no weights"
        )
    return _timed(opened_backend(kind, settings, Ranks()), *counted, progress)


def _counted(
    settings: CaptureSettings, attached: AttachedModel, progress: Progress
) -> tuple[Audit, KeptSamples, TokeniseOptions]:
    """Tokenize the input once: what it holds, and samples of it."""
    options = fitted_to(attached.decoder, settings.text, progress).tokenise_options(
        settings.model, date=datetime.date.today().isoformat(), vocab_rows=attached.decoder.vocab_rows
    )
    kept = KeptSamples(min(settings.shard_rows, KEPT_ROWS))
    items = tokenise(settings.data, RecordEncoder(options), workers=settings.text.workers, limit=settings.text.limit)
    return audit(kept.keeping(with_progress(items, progress)), settings.text.gate()), kept, options


def _timed(
    backend: Backend[Any], audited: Audit, kept: KeptSamples, options: TokeniseOptions, progress: Progress
) -> RunEstimate:
    settings, attached = backend.settings, backend.attached
    require_images_taken(backend, kept.have_images)
    dtype = _store_dtype(settings, attached)
    samples = kept.in_order(image_processor_of(options) if kept.have_images else None)
    with backend.engine(dtype, kept.longest) as engine:
        # Of no tokens: a trial is too short for compiled layers to save what they cost.
        pacer = backend.pacer(engine, 0, progress.note)
        forwards = Forwards(pacer, engine.device, attached.limits, progress.note, settings.prefill_chunk)
        block = _block(pacer, forwards, samples, audited.tokens, settings.shard_rows)
        speed = tokens_per_second(forwards, samples) if block is None else audited.tokens / block.seconds
    needed = bytes_of_rows(attached.columns(dtype, is_text=kept.have_images), audited.tokens)
    return RunEstimate(audited, needed, free_bytes(settings.out), speed, planned_taps(settings, attached), block=block)


def _block(pacer: Pacer, forwards: Forwards, samples: SampleRows, tokens: int, shard_rows: int) -> BlockEstimate | None:
    """Return the blocks of a run with streamed weights, tried on a few batches of `samples`; None for others."""
    batches = forwards.cut(samples) if isinstance(pacer, BlockPacer) else []
    if not isinstance(pacer, BlockPacer) or not batches:
        return None
    # Batches of all lengths, in the order of the lengths.
    tried = batches[:: ceil(len(batches) / TRIED_BATCHES)]
    return block_estimate(pacer, tried, tokens, shard_rows)


def _store_dtype(settings: CaptureSettings, attached: AttachedModel) -> torch.dtype:
    return STORE_DTYPES[settings.store_dtype] if settings.store_dtype else attached.dtype
