"""The model's own processor: a rendering and its images to expanded ids, and to what a forward takes in."""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig

from ....models.errors import RunError, UsageError
from ....models.hub import file_of
from ....models.images import placeholder_id, repeated, rows_of_images
from ..errors import RecordError
from ..offsets import keep_white_space_in_offsets, offsets_of
from ..options import TokeniseOptions
from ..records.items import Rows, SampleImages
from .files import read_image

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_LOADING_ERRORS = (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError)
# What a processor raises on a text or an image that it was not written for.
_PROCESSOR_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
_FLAGS = {"return_offsets_mapping": True, "return_text_replacement_offsets": True}
# Of what a processor adds for each position: what stands at text behind the last image.
_AT_TEXT = {"attention_mask": 1}


@dataclass(frozen=True, eq=False)
class Expansion:
    """A rendering with its images in it.

    `input_ids`: (S,) int64, one for each hidden row. `offsets`: (S, 2) int64, the characters of the rendering that each token
    stands for, those of the placeholder for tokens of an image; None where nobody can tell. `blocks`: the tokens of each image,
    first and one past the last, its frame included. `text_ends`: where each image's placeholder ends in the rendering.
    """

    input_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64] | None
    blocks: tuple[Rows, ...]
    text_ends: tuple[int, ...]
    placeholders: tuple[Rows, ...]
    model_expands: bool


def image_processor_of(options: TokeniseOptions) -> "ImageProcessor | None":
    """Return the processor of the run's model, or None if it takes text only. Raises UsageError where one cannot be loaded."""
    name, revision, trust = options.tokenizer, options.revision, options.trust_remote_code
    if not any(file_of(name, revision, file) for file in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor  # slow to import, and a run of texts needs none

    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust)
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
    except _LOADING_ERRORS as error:
        raise UsageError(
            f"expected the image processor of {name} to load; it says: {error}. Most need pillow and torchvision: "
            "pip install 'hiddentap[images]'"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        return None
    token = placeholder_id(config)
    if token is None:
        raise UsageError(
            f"expected the config of {name} to name the token that stands for an image (image_token_id); it does not."
        )
    keep_white_space_in_offsets(processor.tokenizer)
    return ImageProcessor(processor, config, token)


class ImageProcessor:
    """One model's processor; `token` is the id in whose place the model puts image features."""

    def __init__(self, processor: Any, config: Any, token: int) -> None:
        self._processor, self._config, self._token = processor, config, token
        # Kimi-K2.5's own processor calls images media.
        self._takes_media = "medias" in inspect.signature(type(processor).__call__).parameters

    @cached_property
    def sha256(self) -> str:
        """Of everything that the processor's configuration says of images, in hex."""
        part = self._processor.image_processor
        values = {"processor": type(self._processor).__name__, "image_processor": type(part).__name__}
        text = json.dumps(values | {"fields": part.to_dict()}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def expand(self, text: str, images: Sequence[Any]) -> Expansion:
        """Return the rendering `text` with its images; raises RecordError where the processor does not take them."""
        flags = _FLAGS if self._processor.tokenizer.is_fast else {"return_text_replacement_offsets": True}
        try:
            made = self._call(text, images, **flags)
        except _PROCESSOR_ERRORS as error:
            raise RecordError(
                "images_refused", f"expected the processor to take the row and its images; it says: {error}"
            ) from error
        ids = made["input_ids"][0]
        placed, rows = int((ids == self._token).sum()), rows_of_images(self._config, made)
        if placed == len(images) and rows is not None and sum(rows) != placed:
            return self._expanded_by_model(text, made, rows)
        if rows is not None and sum(rows) != placed:
            raise RecordError(
                "images_refused",
                f"expected {sum(rows)} placeholders for the {len(images)} image(s) of the row, or one each; found {placed}",
            )
        return self._expanded_here(made)

    def inputs(self, images: SampleImages, input_ids: npt.NDArray[np.int32]) -> dict[str, Tensor]:
        """Return the inputs of the model's forward: the processor's output for the sample's ids and images.

        input_ids: (S,), the expanded ids of the plan. Raises RunError where an image file is not what it was.
        """
        made = self._call(images.text, [_unchanged(file.path, file.sha256) for file in images.files])
        ids = torch.from_numpy(input_ids.astype(np.int64))
        given = _collapsed(ids, images.placeholders) if images.model_expands else ids
        found = made["input_ids"][0]
        if not torch.equal((found == self._token).nonzero(), (given == self._token).nonzero()):
            raise RunError(
                f"the processor places the images of {', '.join(file.path for file in images.files)} elsewhere than when the run "
                "was planned; it or its libraries changed. Use those again, or choose another folder."
            )
        per_token = {
            name: v for name, v in made.items() if isinstance(v, Tensor) and v.shape == made["input_ids"].shape
        }
        return (
            dict(made)
            | {name: _fitted(name, v, len(given)) for name, v in per_token.items()}
            | {"input_ids": given[None]}
        )

    def _call(self, text: str, images: Sequence[Any], **flags: Any) -> Any:
        # As the processor's own `apply_chat_template` calls it.
        bos = self._processor.tokenizer.bos_token
        if bos is not None and text.startswith(bos):
            flags["add_special_tokens"] = False
        if self._takes_media:
            medias = [{"type": "image", "image": image} for image in images]
            return self._processor(text=text, medias=medias, return_tensors="pt")
        return self._processor(text=text, images=[list(images)], return_tensors="pt", **flags)

    def _expanded_by_model(self, text: str, made: Mapping[str, Any], rows: tuple[int, ...]) -> Expansion:
        ids = made["input_ids"][0]
        encoding = self._encoding(text, ids)
        offsets = offsets_of(self._processor.tokenizer, encoding, text)
        at = (ids == self._token).nonzero()[:, 0].numpy()
        counts = np.ones(len(ids), np.int64)
        counts[at] = rows
        ends = np.cumsum(counts)[at]
        blocks = tuple((int(end) - count, int(end)) for end, count in zip(ends, rows, strict=True))
        if offsets is None:
            # Then no conversation gets a mask but the one over all of it, and a cut text is found by its placeholders.
            text_ends = (len(text),) * len(rows)
        else:
            text_ends = tuple(int(offsets[place, 1]) for place in at)
            offsets = np.repeat(offsets, counts, axis=0)
        return Expansion(
            repeated(ids, self._token, rows).numpy(), offsets, blocks, text_ends, blocks, model_expands=True
        )

    def _encoding(self, text: str, ids: Tensor) -> Any:
        """Return the tokenizer's own encoding of `text`, which must be what the processor made of it."""
        tokenizer = self._processor.tokenizer
        fast = bool(tokenizer.is_fast)
        for special in (False, True):
            encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=fast, verbose=False)
            if list(encoding["input_ids"]) == ids.tolist():
                return encoding
        raise _not_told()

    def _expanded_here(self, made: Mapping[str, Any]) -> Expansion:
        replaced = made.get("text_replacement_offsets")
        if not replaced or made.get("offset_mapping") is None:
            raise _not_told()
        ids = made["input_ids"][0].numpy()
        expanded = np.asarray(made["offset_mapping"], np.int64).reshape(-1, 2)
        spans = [(tuple(one["span"]), tuple(one["new_span"])) for one in replaced[0]]
        blocks = tuple(_tokens_within(expanded, new) for _, new in spans)
        offsets = np.stack(
            [_before_expansion(expanded[:, 0], spans, 0), _before_expansion(expanded[:, 1], spans, 1)], 1
        )
        text_ends = tuple(int(old[1]) for old, _ in spans)
        return Expansion(ids, offsets, blocks, text_ends, _runs(ids == self._token), model_expands=False)


def _unchanged(path: str, sha256: str) -> Any:
    try:
        file, image = read_image(Path(path))
    except RecordError as error:
        raise RunError(f"{error.reason}; it was there when the run was planned. Restore it and run again.") from error
    if file.sha256 != sha256:
        raise RunError(
            f"{path} is not the image any more that the run was planned with; restore it, or choose another folder."
        )
    return image


def _not_told() -> RecordError:
    return RecordError(
        "images_refused",
        "expected the processor to tell which tokens each image became; this one does not, so rows cannot be aligned",
    )


def _tokens_within(offsets: npt.NDArray[np.int64], span: Rows) -> Rows:
    """Return the tokens with characters inside `span`."""
    inside = np.flatnonzero((offsets[:, 0] < span[1]) & (offsets[:, 1] > span[0]))
    if not inside.size:
        raise _not_told()
    return int(inside[0]), int(inside[-1]) + 1


def _before_expansion(
    places: npt.NDArray[np.int64], spans: Sequence[tuple[Rows, Rows]], edge: int
) -> npt.NDArray[np.int64]:
    """Characters of the expanded text as characters of the text before; inside an image, that edge of its placeholder."""
    before = places.copy()
    for old, new in spans:
        after = places >= new[1]
        before[after] = places[after] - new[1] + old[1]
        before[(places > new[0]) & ~after] = old[edge]
    return before


def _runs(at: npt.NDArray[np.bool_]) -> tuple[Rows, ...]:
    edges = np.flatnonzero(np.diff(at.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def _collapsed(ids: Tensor, placeholders: Sequence[Rows]) -> Tensor:
    """Return (S,) expanded ids with one placeholder for each image again."""
    kept = torch.ones(len(ids), dtype=torch.bool)
    for start, stop in placeholders:
        kept[start + 1 : stop] = False
    return ids[kept]


def _fitted(name: str, values: Tensor, S: int) -> Tensor:
    """Return (1, S) of values over the positions that the processor saw: up to the last image, or all of them."""
    missing = S - values.shape[1]
    return values[:, :S] if missing <= 0 else torch.nn.functional.pad(values, (0, missing), value=_AT_TEXT.get(name, 0))
