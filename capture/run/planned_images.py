"""The images of a planned run: one sample a forward, from the files that the plan was made of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...models.errors import RunError, UsageError
from ..data import ImageProcessor, SampleImages, TokeniseOptions, image_processor_of
from ..store import Plan, PlannedShard
from .settings import CaptureSettings

_PROCESSOR = "image_processor_sha256"


def processor_of_images(options: TokeniseOptions, images: int) -> dict[str, Any]:
    """What a plan keeps of the processor of its images; nothing where it has none."""
    processor = image_processor_of(options) if images else None
    return {} if processor is None else {"images": images, _PROCESSOR: processor.sha256}


def require_engine_for_images(settings: CaptureSettings, has_images: bool) -> None:
    """Raise UsageError where the engine of a run with images takes text alone."""
    if has_images and settings.engine != "hf":
        raise UsageError(f"rows with images need --engine hf: with {settings.engine} the run takes text alone.")
    if has_images and settings.tp > 1:
        raise UsageError("rows with images need a model in one process: with tp (--tp) the run takes text alone.")


def image_metadata(plan: Plan) -> dict[str, Any]:
    """What the header of a shard says of images; nothing where the run has none."""
    return {_PROCESSOR: plan.extra[_PROCESSOR]} if plan.has_images else {}


def require_same_images(plan: Plan) -> None:
    """Raise UsageError where an image file of the plan is not what it was; every file is read."""
    for sample in plan.image_samples.tolist():
        for file in SampleImages.from_json(plan.images(sample) or {}).files:
            found = _sha256(Path(file.path))
            if found != file.sha256:
                what = "cannot be read any more" if found is None else "is not the image any more that it was"
                raise UsageError(
                    f"{file.path} of sample {plan.sample_id(sample)!r} {what} when the run in {plan.folder.parent} was planned; "
                    "restore it, or choose another folder."
                )


def planned_images(plan: Plan, options: TokeniseOptions) -> PlannedImages | None:
    """The images of `plan`, None where it has none; raises UsageError where the processor is another than it was planned with."""
    if not plan.has_images:
        return None
    processor = image_processor_of(options)
    if processor is None or processor.sha256 != plan.extra[_PROCESSOR]:
        raise UsageError(
            f"the image processor of {options.tokenizer} is not the one that the run in {plan.folder.parent} was planned with; "
            "restore it, or choose another folder."
        )
    return PlannedImages(plan, processor)


class PlannedImages:
    """Which samples of a plan have images, and the inputs of their forwards."""

    def __init__(self, plan: Plan, processor: ImageProcessor) -> None:
        self._plan, self._processor = plan, processor

    def stop_before(self, shard: PlannedShard, first: int, stop: int) -> int:
        """Where a batch of samples first..stop-1 ends, so that a sample with images has a forward of its own."""
        with_images = np.flatnonzero(np.isin(shard.sample_index[first:stop], self._plan.image_samples))
        if not with_images.size:
            return stop
        return first + max(int(with_images[0]), 1)

    def inputs(self, shard: PlannedShard, place: int, input_ids: NDArray[np.int32]) -> dict[str, Tensor] | None:
        """What the forward of the sample at `place` takes, None where it has no image; raises RunError for a changed file.

        input_ids: (S,), the expanded ids.
        """
        sample = int(shard.sample_index[place])
        found = self._plan.images(sample)
        if found is None:
            return None
        try:
            return self._processor.inputs(SampleImages.from_json(found), input_ids)
        except RunError as error:
            raise RunError(f"sample {self._plan.sample_id(sample)!r}: {error}") from error


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
