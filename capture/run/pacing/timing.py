"""Speed of a model, measured on samples of the input in the batches that a run would make."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ...data import ImageProcessor, Item, Sample
from ..batches import ImageInputs, SampleRows
from .forwards import Forwards

# Rows that are kept to be timed: a shard of the default size. Fewer would leave gaps between the lengths of neighbors, and
# batches would be smaller than those of the run.
KEPT_ROWS = 262_144
SECONDS = 10.0


class KeptSamples:
    """Samples at even distances in the input: all of them up to `most` rows, then at least half as many rows.

    Attributes:
        longest: tokens of the longest sample of the input.
        have_images: whether any sample of the input has images.
    """

    def __init__(self, most: int) -> None:
        self._most, self._rows, self._step = most, 0, 1
        self._samples: list[Sample] = []
        self.longest = 1
        self.have_images = False

    def keeping(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass `items` on."""
        seen = 0
        for item in items:
            if isinstance(item, Sample):
                self.longest = max(self.longest, len(item.input_ids))
                self.have_images |= item.images is not None
                if seen % self._step == 0:
                    self._keep(item)
                seen += 1
            yield item

    def in_order(self, processor: ImageProcessor | None) -> SampleRows:
        """Return them as a shard would hold them; `processor` makes the inputs of those with images."""
        ordered = sorted(self._samples, key=lambda sample: len(sample.input_ids))
        offsets = np.cumsum([0, *(len(sample.input_ids) for sample in ordered)], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, np.int32), *(sample.input_ids for sample in ordered)])
        return SampleRows(
            [sample.sample_id for sample in ordered],
            offsets,
            torch.from_numpy(ids),
            None if processor is None else _images_of(ordered, processor),
        )

    def _keep(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._rows += len(sample.input_ids)
        if self._rows > self._most and len(self._samples) > 1:
            del self._samples[1::2]
            self._step *= 2
            self._rows = sum(len(kept.input_ids) for kept in self._samples)


def tokens_per_second(forwards: Forwards, samples: SampleRows) -> float:
    """Return the speed of the forwards of `samples`, tried for `SECONDS` or over twice their tokens; 0 where there are none.

    The first forward warms up and is not counted. Once the pacer has settled on a size, only its batches count.
    """
    settled_on, tokens, seconds, end = None, 0, 0.0, time.perf_counter() + SECONDS
    tried = 0
    for first in _starts(samples):
        if forwards.pacer.batch_tokens != settled_on:
            settled_on, tokens, seconds = forwards.pacer.batch_tokens, 0, 0.0
        start = time.perf_counter()
        ran = forwards.run(samples, first)
        if forwards.device.type != "cpu":
            torch.accelerator.synchronize(forwards.device)
        if tried:
            tokens, seconds = tokens + ran, seconds + time.perf_counter() - start
        tried += ran
        if tokens and (tried >= 2 * samples.row_offsets[-1] or time.perf_counter() > end):
            break
    return tokens / max(seconds, 1e-9)


def _starts(samples: SampleRows) -> Iterator[int]:
    """Yield samples evenly spread over the rows, the middle first, so that a trial that ends early has seen usual lengths."""
    R = int(samples.row_offsets[-1])
    for number in itertools.count(1) if R else ():
        # The bits of the number behind the point, in reverse: 1/2, 1/4, 3/4, 1/8, ...
        share = sum((number >> bit & 1) / 2 ** (bit + 1) for bit in range(number.bit_length()))
        yield int(np.searchsorted(samples.row_offsets, int(share * R), side="right")) - 1


def _images_of(ordered: list[Sample], processor: ImageProcessor) -> ImageInputs:
    def inputs(place: int) -> Mapping[str, Tensor]:
        images = ordered[place].images
        return {} if images is None else processor.inputs(images, ordered[place].input_ids)

    places = [place for place, sample in enumerate(ordered) if sample.images is not None]
    return ImageInputs(np.array(places, np.int64), inputs)
