"""What a run would do, fill and take, without writing anything."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...models.errors import UsageError
from ..data import Audit, ImageProcessor, Item, RejectGate, Sample, audit, image_processor_of, tokenise
from ..progress import Progress, Silent
from .batches import TokenBatch, batch_end, token_batch
from .budget import make_room, too_large
from .engine import Engine
from .offline import backend_of
from .planned_images import require_engine_for_images
from .planning import told
from .ranks import Ranks
from .resuming import fitted_to
from .settings import STORE_DTYPES, CaptureSettings
from .space import bytes_of_rows, free_bytes

# Samples that the forward is timed on, taken evenly from the whole input, and for how long.
PROBED_SAMPLES = 256
PROBE_SECONDS = 10.0
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class RunEstimate:
    """The audit of the input, and what capturing it would cost.

    Attributes:
        bytes_needed, bytes_free: of the rows, and of the disk.
        tokens_per_second: of the forward, tried on samples of the input; 0 where there were none.
    """

    audit: Audit
    bytes_needed: int
    bytes_free: int
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Of the forwards of the whole run, without loading and tokenising."""
        return self.audit.tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    @property
    def fits(self) -> bool:
        return self.bytes_needed <= self.bytes_free


def estimate_run(settings: CaptureSettings, progress: Progress | None = None) -> RunEstimate:
    """Tokenise the input of `settings`, time a few forwards, and add up; raises as `capture_dataset` does."""
    if settings.tp > 1:
        raise UsageError("a dry run times the forwards of one process; leave tp (--tp) out, or see `hiddentap audit`.")
    progress = progress or Silent()
    backend = backend_of(settings, Ranks())
    attached = backend.attached
    today = datetime.date.today().isoformat()
    options = fitted_to(attached.decoder, settings.text, progress).tokenise_options(
        settings.model, date=today, vocab_rows=attached.decoder.vocab_rows
    )
    kept: list[Sample] = []
    items = tokenise(settings.data, options, workers=settings.text.workers, limit=settings.text.limit)
    gate = RejectGate(settings.text.allow_rejects, strict=settings.text.strict)
    counted = audit(_keeping(told(items, progress), kept), gate)
    processor = image_processor_of(options) if any(sample.images for sample in kept) else None
    dtype = STORE_DTYPES[settings.store_dtype] if settings.store_dtype else attached.dtype
    longest = max((len(sample.input_ids) for sample in kept), default=1)
    require_engine_for_images(settings, processor is not None)
    with backend.engine(dtype, longest) as engine:
        budget = 1 if settings.exact else settings.batch_tokens or BATCH_TOKENS
        speed = None
        while speed is None:
            speed = _tokens_per_second(engine, _batches(kept, budget, processor))
            if speed is None:
                budget = _smaller(budget, longest, engine.device, progress)
    columns = attached.columns(dtype, is_text=processor is not None)
    return RunEstimate(counted, bytes_of_rows(columns, counted.tokens), free_bytes(settings.out), speed)


def _keeping(items: Iterable[Item], kept: list[Sample]) -> Iterator[Item]:
    """Pass `items` on; `kept` ends as at most PROBED_SAMPLES samples at even distances."""
    step, seen = 1, 0
    for item in items:
        if isinstance(item, Sample):
            if seen % step == 0:
                kept.append(item)
            seen += 1
            if len(kept) == 2 * PROBED_SAMPLES:
                del kept[1::2]
                step *= 2
        yield item


def _smaller(budget: int, longest: int, device: torch.device, progress: Progress) -> int:
    """Half of a budget whose batch did not fit the device; raises RunError where that was one sample already."""
    if budget <= longest:
        raise too_large(f"a sample of up to {longest} tokens", device)
    make_room(device)
    progress.note(f"a batch of {budget} positions did not fit {device}; trying {budget // 2}")
    return budget // 2


def _tokens_per_second(engine: Engine, batches: Iterable[TokenBatch]) -> float | None:
    """Of the forwards of `batches`; 0 where there are none, None where one did not fit the device."""
    tokens = 0
    start = time.perf_counter()
    for batch in batches:
        try:
            engine.forward(batch)
        except torch.OutOfMemoryError:
            return None
        if engine.device.type != "cpu":
            torch.accelerator.synchronize(engine.device)
        if tokens == 0:  # the first forward warms up and is not counted
            start, tokens = time.perf_counter(), 1
            continue
        tokens += batch.positions.T
        if time.perf_counter() - start > PROBE_SECONDS:
            break
    return tokens / max(time.perf_counter() - start, 1e-9) if tokens > 1 else 0.0


def _batches(samples: list[Sample], budget: int, processor: ImageProcessor | None) -> Iterator[TokenBatch]:
    """Batches of all lengths in turn, twice, so that there is more than one even of few samples."""
    ordered = sorted(samples, key=lambda sample: len(sample.input_ids))
    lengths = np.array([len(sample.input_ids) for sample in ordered], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = (
        torch.from_numpy(np.concatenate([s.input_ids for s in ordered]))
        if ordered
        else torch.zeros(0, dtype=torch.int32)
    )
    cuts, first = [], 0
    while first < len(ordered):
        stop = batch_end(lengths, first, budget)
        alone = [place for place in range(first, stop) if ordered[place].images]
        stop = max(alone[0], first + 1) if alone else stop
        cuts.append((first, stop))
        first = stop
    # From the middle outwards: a probe that ends early has seen the usual lengths.
    cuts.sort(key=lambda cut: abs(cut[0] - len(ordered) // 2))
    for first, stop in cuts * 2:
        batch, images = token_batch(first, stop, offsets, ids), ordered[first].images
        inputs = processor.inputs(images, ordered[first].input_ids) if processor and images else None
        yield replace(batch, inputs=inputs)
