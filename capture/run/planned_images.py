"""The images of a planned run: one sample a forward, from the files that the plan was made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...models.errors import RunError, UsageError
from ..data import ImageProcessor, SampleImages, TokeniseOptions, image_processor_of
from ..store import Plan, PlannedShard
from .backend import Backend
from .batches import ImageInputs


def processor_hash(options: TokeniseOptions) -> str | None:
    """Return the hash of the model's image processor; None for a model that takes text alone."""
    processor = image_processor_of(options)
    return None if processor is None else processor.sha256


def require_images_taken(backend: Backend[Any], has_images: bool) -> None:
    """Raise UsageError where a run has images and its backend takes text alone."""
    if not has_images or backend.takes_images:
        return
    settings = backend.settings
    if settings.tp > 1:
        raise UsageError("rows with images need a model in one process: with tp (--tp) the run takes text alone.")
    if settings.stream_weights:
        raise UsageError(
            "rows with images need a model in memory: with stream_weights (--stream-weights) the run takes text alone."
        )
    raise UsageError(f"rows with images need --engine hf: with {settings.engine} the run takes text alone.")


def image_metadata(plan: Plan) -> dict[str, Any]:
    """Return what a shard's header records of images; nothing for a run without images."""
    return {"image_processor_sha256": plan.extra.image_processor_sha256} if plan.has_images else {}


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
    """Return the images of `plan`, or None; raise UsageError if the processor differs from the planned one."""
    if not plan.has_images:
        return None
    processor = image_processor_of(options)
    if processor is None or processor.sha256 != plan.extra.image_processor_sha256:
        raise UsageError(
            f"the image processor of {options.tokenizer} is not the one that the run in {plan.folder.parent} was planned with; "
            "restore it, or choose another folder."
        )
    return PlannedImages(plan, processor)


class PlannedImages:
    """The samples of a plan that have images, and the inputs of their forwards."""

    def __init__(self, plan: Plan, processor: ImageProcessor) -> None:
        self._plan, self._processor = plan, processor

    def of_shard(self, shard: PlannedShard, input_ids: Tensor) -> ImageInputs:
        """Return the images of one shard; its inputs raise RunError for a changed file.

        input_ids: (R,) int32, the shard's expanded ids.
        """
        ids = input_ids.numpy()
        places = np.flatnonzero(np.isin(shard.sample_index, self._plan.image_samples))

        def inputs(place: int) -> Mapping[str, Tensor]:
            begin, end = shard.row_offsets[place : place + 2].tolist()
            return self._inputs(int(shard.sample_index[place]), ids[begin:end])

        return ImageInputs(places, inputs)

    def _inputs(self, sample: int, input_ids: NDArray[np.int32]) -> Mapping[str, Tensor]:
        try:
            return self._processor.inputs(SampleImages.from_json(self._plan.images(sample) or {}), input_ids)
        except RunError as error:
            raise RunError(f"sample {self._plan.sample_id(sample)!r}: {error}") from error


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
