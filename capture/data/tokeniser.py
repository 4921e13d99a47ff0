"""One raw row to one item."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .conversation import Conversation
from .dropped import dropped_parts
from .image_files import image_path, read_image
from .image_processor import Expansion, ImageProcessor, image_processor_of
from .items import Item, Reject, Sample
from .kimi import KimiMasks
from .loss_mask import ALL, KIMI_TOKENS, ROW, LossMasks, Masked
from .offsets import keep_white_space_in_offsets, offsets_of
from .options import TokeniseOptions
from .raw_row import RawRow
from .rendering import Rendering, render_conversation
from .row_error import RowError
from .row_json import parse_object
from .sample_images import ImageFile, SampleImages
from .schema import Text, TokenIds, read_body, read_id, require_encodable
from .template import ChatTemplate
from .thinking import require_tagged, without_thinking
from .tokenizer import load_tokenizer

_REJECTED_IF_STRICT = (
    "content_changed",
    "message_dropped",
    "reasoning_dropped",
    "tool_calls_dropped",
    "tool_calls_not_supervised",
    "tools_dropped",
)
_Tokens = tuple[npt.NDArray[np.int64], Masked]


class Tokeniser:
    """Turns raw rows into samples and rejects under fixed options. Raises UsageError where no tokenizer can be loaded."""

    def __init__(self, options: TokeniseOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer(options.tokenizer, options.revision, options.trust_remote_code)
        keep_white_space_in_offsets(self.tokenizer)
        self.template = ChatTemplate(self.tokenizer, options.chat_template, options.template_args, options.date)
        self._masks = LossMasks(self.template, options.loss_on)
        self._kimi = self._kimi_masks() if options.ids_format == "kimi" else None

    def item(self, row: RawRow) -> Item:
        """The sample of a row, or the reject that says why there is none."""
        sample_id = None
        try:
            values = parse_object(row.payload) if isinstance(row.payload, bytes) else row.payload
            sample_id = read_id(values, row.source, row.line)
            return self._sample(row, sample_id, read_body(values, take_images=True))
        except RowError as error:
            return Reject(row.source, row.line, sample_id, error.reason, error.code)

    def _sample(self, row: RawRow, sample_id: str, body: Conversation | Text | TokenIds) -> Sample:
        if isinstance(body, Conversation) and body.images:
            return self._sample_with_images(row, sample_id, body)
        ids, masked = self._tokens(body)
        masked = self._checked(ids, masked)
        return _sample(row, sample_id, ids, masked, self._kept_length(ids, masked))

    def _sample_with_images(self, row: RawRow, sample_id: str, conversation: Conversation) -> Sample:
        if self._image_processor is None:
            place = conversation.images[0][0]
            raise RowError(
                "bad_content",
                f"expected text parts in the content of message {place}; found a part of 'image', and the model has no image "
                "processor",
            )
        read = [read_image(image_path(part, place, row.source)) for place, part in conversation.images]
        rendering = render_conversation(self.template, conversation)
        require_encodable(rendering.text, "conversation")
        if self.options.think == "mask":
            require_tagged(rendering)
        expansion = self._image_processor.expand(rendering.text, [picture for _, picture in read])
        masked = self._checked(expansion.input_ids, self._masked_beside_images(rendering, expansion))
        length = self._kept_length(expansion.input_ids, masked)
        images = kept_images(rendering.text, [file for file, _ in read], expansion, length)
        return replace(_sample(row, sample_id, expansion.input_ids, masked, length), images=images)

    @cached_property
    def _image_processor(self) -> ImageProcessor | None:
        return image_processor_of(self.options)

    def _masked_beside_images(self, rendering: Rendering, expansion: Expansion) -> Masked:
        masked = self._masks.mask(rendering, len(expansion.input_ids), expansion.offsets)
        loss_mask = masked.loss_mask.copy()
        for start, stop in expansion.placeholders:
            loss_mask[start:stop] = 0
        return Masked(loss_mask, masked.rule, masked.warnings | dropped_parts(self.template, rendering))

    def _checked(self, ids: npt.NDArray[np.int64], masked: Masked) -> Masked:
        self._require_in_vocabulary(ids)
        if self.options.think == "mask":
            masked = replace(masked, loss_mask=without_thinking(self.tokenizer, ids, masked.loss_mask))
        self._require_strict(masked)
        if not masked.loss_mask.any():
            raise RowError("unsupervised", "expected at least one supervised token; found none the assistant writes")
        return masked

    def _tokens(self, body: Conversation | Text | TokenIds) -> _Tokens:
        if isinstance(body, Conversation):
            return self._conversation(body)
        if isinstance(body, TokenIds):
            return self._given(body)
        require_encodable(body.text, "text")
        ids = np.asarray(self.tokenizer(body.text, verbose=False)["input_ids"], np.int64)
        begins_twice = len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id
        warnings = frozenset({"begin_token_twice"} if begins_twice else ())
        return ids, Masked(np.ones(len(ids), np.uint8), ALL, warnings)

    def _conversation(self, conversation: Conversation) -> _Tokens:
        rendering = render_conversation(self.template, conversation)
        require_encodable(rendering.text, "conversation")
        if self.options.think == "mask":
            require_tagged(rendering)
        encoding = self.template.encode(conversation.messages, conversation.tools)
        ids = np.asarray(encoding["input_ids"], np.int64)
        masked = self._masks.mask(rendering, len(ids), offsets_of(self.tokenizer, encoding, rendering.text))
        dropped = dropped_parts(self.template, rendering)
        return ids, Masked(masked.loss_mask, masked.rule, masked.warnings | dropped)

    def _given(self, body: TokenIds) -> _Tokens:
        try:
            ids = np.asarray(body.input_ids, np.int64)
        except OverflowError as error:
            raise RowError("id_outside_vocabulary", "expected ids of 32 bits; found a larger integer") from error
        if body.loss_mask is not None:
            return ids, Masked(np.asarray(body.loss_mask, np.uint8), ROW, frozenset())
        if self._kimi is not None:
            return ids, Masked(self._kimi.mask(ids), KIMI_TOKENS, frozenset())
        return ids, Masked(np.ones(len(ids), np.uint8), ALL, frozenset())

    def _kimi_masks(self) -> KimiMasks:
        has_template = self.options.chat_template or self.tokenizer.chat_template
        return KimiMasks(self.tokenizer, self.template.generation_prompt() if has_template else "")

    def _require_strict(self, masked: Masked) -> None:
        found = [code for code in _REJECTED_IF_STRICT if code in masked.warnings]
        if self.options.strict and found:
            raise RowError(
                found[0], f"expected the template to render the row as it stands (strict); found {', '.join(found)}"
            )

    def _require_in_vocabulary(self, ids: npt.NDArray[np.int64]) -> None:
        rows = np.iinfo(np.int32).max if self.options.vocab_rows is None else self.options.vocab_rows
        outside = np.flatnonzero((ids < 0) | (ids >= rows))
        if outside.size:
            at = int(outside[0])
            raise RowError("id_outside_vocabulary", f"expected ids within 0..{rows - 1}; found {ids[at]} at token {at}")

    def _kept_length(self, ids: npt.NDArray[np.int64], masked: Masked) -> int:
        limit = self.options.max_length
        if len(ids) <= limit:
            return len(ids)
        if self.options.on_too_long == "drop":
            raise RowError("too_long", f"expected at most {limit} tokens; found {len(ids)}")
        if not masked.loss_mask[:limit].any():
            raise RowError(
                "unsupervised_after_truncation",
                f"expected a supervised token among the first {limit}; found the first one of {len(ids)} tokens at "
                f"{int(masked.loss_mask.argmax())}",
            )
        return limit


def _sample(row: RawRow, sample_id: str, ids: npt.NDArray[np.int64], masked: Masked, length: int) -> Sample:
    return Sample(
        sample_id=sample_id,
        source=row.source,
        line=row.line,
        input_ids=ids[:length].astype(np.int32),
        loss_mask=masked.loss_mask[:length],
        mask_rule=masked.rule,
        warnings=tuple(sorted(masked.warnings)),
        truncated_from=len(ids) if length < len(ids) else None,
    )


def kept_images(text: str, files: Sequence[ImageFile], expansion: Expansion, length: int) -> SampleImages | None:
    """The images among the first `length` tokens; None where none is left.

    Raises RowError where the cut would go through an image: half of one is no input of any model.
    """
    for place, (start, stop) in enumerate(expansion.blocks):
        if start < length < stop:
            raise RowError(
                "image_cut",
                f"expected whole images among the first {length} tokens; found image {place} at tokens {start}..{stop - 1}; "
                "raise --max-length",
            )
    count = sum(stop <= length for _, stop in expansion.blocks)
    if not count:
        return None
    cut = length < len(expansion.input_ids)
    return SampleImages(
        text[: expansion.text_ends[count - 1]] if cut else text,
        tuple(files[:count]),
        tuple(rows for rows in expansion.placeholders if rows[1] <= length),
        expansion.model_expands,
    )
