"""Input records to token ids and loss masks, with one tokenizer under fixed options."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...models.errors import UsageError
from ..rejects import Reject
from .chat.conversation import Conversation
from .chat.deadline import DeadlineExceeded, MemoryExceeded, deadline
from .chat.rendering import Rendering, render_conversation
from .chat.template import ChatTemplate, tokenized
from .chat.text_diff import Span
from .errors import MEMORY_CODE, TIMEOUT_CODE, RecordError
from .images.files import image_path, read_image
from .images.processor import Expansion, ImageProcessor, image_processor_of
from .loading import load_tokenizer, other_ids_than_its_file
from .masks.kimi import KimiMasks
from .masks.loss_mask import ALL, COMPLETION, KIMI_TOKENS, TEXT_TURNS, LossMasks, Masked, mask_of_text
from .masks.text_turns import TextTurns
from .masks.thinking import require_tagged, without_thinking
from .masks.unrendered import DROPPED_CODES, dropped_parts
from .offsets import keep_white_space_in_offsets, offsets_of
from .options import TokeniseOptions
from .records.fields import Fields, FieldUse, without_nulls
from .records.given_ids import TokenIds
from .records.items import ImageFile, Item, RawRecord, Sample, SampleImages
from .records.json_files import parse_object
from .schema import Body, Text, read_body, read_id, require_encodable, require_no_preference

# Long enough for any record on a busy machine; a template that does not end must end.
RECORD_SECONDS = 60.0
RECORD_BYTES = 4 << 30
_REJECTED_IF_STRICT = (
    "content_changed",
    "earlier_reasoning_dropped",
    "empty_turn",
    "tool_calls_not_supervised",
    "text_holds_turns",
    "unknown_tokens",
    *DROPPED_CODES,
)
_KEPT_TEMPLATES = 64
# Shares of tokens that the tokenizer does not know: a warning, and a sign of another model's tokenizer.
_MANY_UNKNOWN, _MOSTLY_UNKNOWN = 0.05, 0.5
_Tokens = tuple[npt.NDArray[np.int64], Masked]


def record_fields(record: RawRecord) -> Fields:
    """Return the fields of a record; raise RecordError where its text is no JSON object.

    A table gives every object of a column the fields of all, as nulls; they are taken out.
    """
    if isinstance(record.payload, bytes):
        return Fields(parse_object(record.payload))
    return Fields({name: without_nulls(value) for name, value in record.payload.items()})


@contextmanager
def record_deadline() -> Iterator[None]:
    """Raise RecordError where the block, the work on one record, takes more than `RECORD_SECONDS` or `RECORD_BYTES`."""
    try:
        with deadline(RECORD_SECONDS, RECORD_BYTES):
            yield
    except MemoryExceeded:
        raise RecordError(
            MEMORY_CODE,
            f"expected a row to be rendered and tokenized within {RECORD_BYTES / (1 << 30):g} GiB of memory; found more in use; "
            "does the chat template grow without end?",
        ) from None
    except DeadlineExceeded:
        raise RecordError(
            TIMEOUT_CODE,
            f"expected a row to be rendered and tokenized within {RECORD_SECONDS:g} s; found it unfinished; does the chat "
            "template end?",
        ) from None


class RecordEncoder:
    """Turns raw records into samples and rejects under fixed options.

    The tokenizer is loaded when it is first needed: records of token ids need none. Raises UsageError, then, where none can be
    loaded.
    """

    def __init__(self, options: TokeniseOptions) -> None:
        self.options = options
        self._masks_by_arguments: dict[str, tuple[ChatTemplate, LossMasks]] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """Return the run's tokenizer; UsageError where it cannot be loaded."""
        options = self.options
        tokenizer = load_tokenizer(options.tokenizer, options.revision, options.trust_remote_code)
        keep_white_space_in_offsets(tokenizer)
        return tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        """Return the run's chat template, with the run's arguments."""
        options = self.options
        return ChatTemplate(self.tokenizer, options.chat_template, options.template_args, options.date)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether a tokenizer can be loaded."""
        try:
            return self.tokenizer is not None
        except UsageError:
            return False

    def notes(self) -> tuple[str, ...]:
        """Return what a user should know of the tokenizer, a line each."""
        if not self.has_tokenizer:
            return ()
        note = other_ids_than_its_file(self.tokenizer, self.options.tokenizer, self.options.revision)
        return () if note is None else (note,)

    def item(self, record: RawRecord) -> Item:
        """Return the sample of a record, or the reject that says why there is none."""
        ids: list[str] = []
        try:
            with record_deadline():
                return self._item(record, ids.append)
        except RecordError as error:
            return Reject.of(record.source, record.line, ids[0] if ids else None, error.reason, error.code)

    def _item(self, record: RawRecord, told_id: Callable[[str], None]) -> Sample:
        fields = record_fields(record)
        sample_id = read_id(fields, record.source, record.line)
        told_id(sample_id)
        body = read_body(fields, take_images=True)
        require_no_preference(fields)
        use = self._field_use(fields, body)
        use.require_harmless(strict=self.options.strict)
        return replace(self._sample(record, sample_id, body), fields=use)

    def _field_use(self, fields: Fields, body: Body) -> FieldUse:
        if isinstance(body, Conversation) and body.message_fields:
            return fields.use().with_messages(body.message_fields, self.template.words(body.tools))
        return fields.use()

    def _sample(self, record: RawRecord, sample_id: str, body: Body) -> Sample:
        if isinstance(body, Conversation) and body.images:
            return self._sample_with_images(record, sample_id, body)
        ids, masked = self._tokens(body)
        masked = self._checked(ids, masked)
        return _sample(record, sample_id, ids, masked, self._kept_length(ids, masked))

    def _masks_for(self, conversation: Conversation) -> tuple[ChatTemplate, LossMasks]:
        """Return the template with the record's own arguments, and what makes masks with it; both keep what they learned."""
        try:
            key = json.dumps(dict(conversation.template_args), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise RecordError(
                "bad_chat_template_kwargs", f"expected JSON values in chat_template_kwargs; {error}"
            ) from error
        if key not in self._masks_by_arguments:
            if len(self._masks_by_arguments) >= _KEPT_TEMPLATES:
                self._masks_by_arguments.clear()
            template = self.template.with_arguments(conversation.template_args)
            self._masks_by_arguments[key] = template, LossMasks(template, self.options.loss_on)
        return self._masks_by_arguments[key]

    def _sample_with_images(self, record: RawRecord, sample_id: str, conversation: Conversation) -> Sample:
        if self._image_processor is None:
            place = conversation.images[0][0]
            raise RecordError(
                "bad_content",
                f"expected text parts in the content of message {place}; found a part of 'image', and the model has no image "
                "processor",
            )
        read = [read_image(image_path(part, place, record.source)) for place, part in conversation.images]
        template, masks = self._masks_for(conversation)
        rendering = self._rendering(template, conversation)
        expansion = self._image_processor.expand(rendering.text, [image for _, image in read])
        masked = masks.mask(rendering, len(expansion.input_ids), expansion.offsets)
        loss_mask = masked.loss_mask.copy()
        for start, stop in expansion.placeholders:
            loss_mask[start:stop] = 0
        warnings = masked.warnings | self._dropped(template, rendering)
        masked = self._checked(expansion.input_ids, Masked(loss_mask, masked.rule, warnings))
        length = self._kept_length(expansion.input_ids, masked)
        images = kept_images(rendering.text, [file for file, _ in read], expansion, length)
        return replace(_sample(record, sample_id, expansion.input_ids, masked, length), images=images)

    @cached_property
    def _image_processor(self) -> ImageProcessor | None:
        return image_processor_of(self.options)

    def _rendering(self, template: ChatTemplate, conversation: Conversation) -> Rendering:
        rendering = render_conversation(template, conversation)
        require_encodable(rendering.text, "conversation")
        if self.options.think == "mask":
            require_tagged(rendering)
        return rendering

    def _dropped(self, template: ChatTemplate, rendering: Rendering) -> frozenset[str]:
        """Return the parts that the template drops; raise RecordError if such rows are not kept."""
        dropped = dropped_parts(template, rendering)
        found = [code for code in DROPPED_CODES if code in dropped]
        if found and self.options.on_dropped != "keep":
            raise RecordError(
                found[0],
                f"expected the template to render the whole row; found that it drops parts ({', '.join(found)}); use a template "
                "that renders them, or keep such rows without them (--on-dropped keep)",
            )
        return dropped

    def _checked(self, ids: npt.NDArray[np.int64], masked: Masked) -> Masked:
        self._require_in_vocabulary(ids)
        if self.options.think == "mask":
            masked = replace(masked, loss_mask=without_thinking(self.tokenizer, ids, masked.loss_mask))
        self._require_strict(masked)
        if not masked.loss_mask.any():
            raise RecordError("unsupervised", "expected at least one supervised token; found none the assistant writes")
        return masked

    def _tokens(self, body: Body) -> _Tokens:
        if isinstance(body, TokenIds):
            return self._given(body)
        ids, masked = self._conversation(body) if isinstance(body, Conversation) else self._text(body)
        return ids, replace(masked, warnings=masked.warnings | self._unknown(ids))

    def _text(self, body: Text) -> _Tokens:
        require_encodable(body.text, "text")
        if self.options.loss_on != "all" and not body.completion and self._turns is not None:
            spans = self._turns.spans(body.text)
            if spans is not None:
                return self._text_of_turns(body.text, spans[-1:] if self.options.loss_on == "last" else spans)
        encoding = self._encoding(body.text, with_offsets=bool(body.completion))
        ids = np.asarray(encoding["input_ids"], np.int64)
        begins_twice = len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id
        warnings = frozenset({"begin_token_twice"} if begins_twice else ())
        if self.options.loss_on == "all" or not body.completion:
            has_turns = self.options.loss_on != "all" and self._turns is not None and self._turns.holds(body.text)
            return ids, Masked(
                np.ones(len(ids), np.uint8), ALL, warnings | ({"text_holds_turns"} if has_turns else set())
            )
        span = (body.completion, len(body.text))
        mask, straddled = mask_of_text(body.text, [span], offsets_of(self.tokenizer, encoding, body.text))
        return ids, Masked(mask, COMPLETION, warnings | straddled)

    def _text_of_turns(self, text: str, spans: Sequence[Span]) -> _Tokens:
        """Return a text that the template wrote, special tokens included."""
        encoding = self._encoding(text, with_offsets=True, add_special_tokens=False)
        mask, straddled = mask_of_text(text, spans, offsets_of(self.tokenizer, encoding, text))
        return np.asarray(encoding["input_ids"], np.int64), Masked(mask, TEXT_TURNS, straddled)

    def _encoding(self, text: str, *, with_offsets: bool, **options: Any) -> Any:
        mapped = with_offsets and bool(self.tokenizer.is_fast)
        return tokenized(self.tokenizer, text, verbose=False, return_offsets_mapping=mapped, **options)

    @cached_property
    def _turns(self) -> TextTurns | None:
        """What finds turns in texts; None without a chat template."""
        has_template = self.options.chat_template or self.tokenizer.chat_template
        return TextTurns(self.template) if has_template else None

    def _conversation(self, conversation: Conversation) -> _Tokens:
        template, masks = self._masks_for(conversation)
        rendering = self._rendering(template, conversation)
        encoding = template.encode(rendering.text, conversation.messages, conversation.tools)
        ids = np.asarray(encoding["input_ids"], np.int64)
        masked = masks.mask(rendering, len(ids), offsets_of(self.tokenizer, encoding, rendering.text))
        dropped = self._dropped(template, rendering)
        return ids, replace(masked, warnings=masked.warnings | dropped)

    def _given(self, body: TokenIds) -> _Tokens:
        try:
            ids = np.asarray(body.input_ids, np.int64)
        except OverflowError as error:
            raise RecordError("id_outside_vocabulary", "expected ids of 32 bits; found a larger integer") from error
        if body.loss_mask is not None:
            return ids, Masked(np.asarray(body.loss_mask, np.uint8), body.rule, frozenset())
        if self._kimi is not None:
            return ids, Masked(self._kimi.mask(ids, last=self.options.loss_on == "last"), KIMI_TOKENS, frozenset())
        return ids, Masked(np.ones(len(ids), np.uint8), ALL, frozenset())

    @cached_property
    def _kimi(self) -> KimiMasks | None:
        if self.options.ids_format != "kimi":
            return None
        has_template = self.options.chat_template or self.tokenizer.chat_template
        return KimiMasks(self.tokenizer, self.template.generation_prompt() if has_template else "")

    def _unknown(self, ids: npt.NDArray[np.int64]) -> frozenset[str]:
        """Return a warning where many tokens are the one for unknown text; RecordError where most are."""
        unknown = self.tokenizer.unk_token_id
        # Some models without such a token name the one that ends a text.
        if unknown is None or unknown == self.tokenizer.eos_token_id or not len(ids):
            return frozenset()
        count = int((ids == unknown).sum())
        if count > _MOSTLY_UNKNOWN * len(ids):
            raise RecordError(
                "unknown_tokens",
                f"expected tokens that the tokenizer knows; found {self.tokenizer.unk_token!r} for {count} of {len(ids)}; is it "
                "the tokenizer of this model?",
            )
        return frozenset({"unknown_tokens"} if count > _MANY_UNKNOWN * len(ids) else ())

    def _require_strict(self, masked: Masked) -> None:
        found = [code for code in _REJECTED_IF_STRICT if code in masked.warnings]
        if self.options.strict and found:
            raise RecordError(
                found[0], f"expected the template to render the row as it stands (strict); found {', '.join(found)}"
            )

    def _require_in_vocabulary(self, ids: npt.NDArray[np.int64]) -> None:
        rows = np.iinfo(np.int32).max if self.options.vocab_rows is None else self.options.vocab_rows
        outside = np.flatnonzero((ids < 0) | (ids >= rows))
        if outside.size:
            at = int(outside[0])
            raise RecordError(
                "id_outside_vocabulary", f"expected ids within 0..{rows - 1}; found {ids[at]} at token {at}"
            )

    def _kept_length(self, ids: npt.NDArray[np.int64], masked: Masked) -> int:
        limit = self.options.max_length
        if len(ids) <= limit:
            return len(ids)
        if self.options.on_too_long == "drop":
            raise RecordError("too_long", f"expected at most {limit} tokens; found {len(ids)}")
        if not masked.loss_mask[:limit].any():
            raise RecordError(
                "unsupervised_after_truncation",
                f"expected a supervised token among the first {limit}; found the first one of {len(ids)} tokens at "
                f"{int(masked.loss_mask.argmax())}",
            )
        return limit


def _sample(record: RawRecord, sample_id: str, ids: npt.NDArray[np.int64], masked: Masked, length: int) -> Sample:
    return Sample(
        sample_id=sample_id,
        source=record.source,
        line=record.line,
        input_ids=ids[:length].astype(np.int32),
        loss_mask=masked.loss_mask[:length],
        mask_rule=masked.rule,
        warnings=tuple(sorted(masked.warnings)),
        truncated_from=len(ids) if length < len(ids) else None,
    )


def kept_images(text: str, files: Sequence[ImageFile], expansion: Expansion, length: int) -> SampleImages | None:
    """Return the images among the first `length` tokens; None where none is left.

    Raises RecordError where the cut would go through an image: half of one is no input of any model.
    """
    for place, (start, stop) in enumerate(expansion.blocks):
        if start < length < stop:
            raise RecordError(
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
